// A key-value server inside a kernel, speaking RESP (the protocol of Redis). Each block is a worker
// with its own connections; the store is in device memory and shared by all. worker.rs and store.rs
// have the equivalents for the simulated GPU; mod.rs defines the layout.
//
// Rank 0 of a block decides; the whole block copies. Network input is not trusted: lengths are
// compared with limits before the data is received, and exceeding a limit gets an error reply and
// closes the connection.
#include <warpwire/sock.cuh>

#include "../serving.cuh"

using namespace warpwire;
using namespace warpwire::sock;
using namespace serving;

namespace {

// As in mod.rs.
struct Setup {
    u64 table, slots, locks, bucket_mask, slot_size, max_value, connections, connection_size;
    u64 in_size, out_size, per_worker, workers, idle_timeout, control, max_clients, counts;
    Address address;
    u64 more;
};
struct Counts {  // in device memory
    u64 clients, keys, commands, refused, closed;
};
struct Slot {
    u32 used, hash, key_length, value_length;  // used: kVacant, kText, kNumber
};
struct Connection {
    int socket;
    u32 in_length, out_at, out_length, closing, unused;
    u64 since;  // when a partial command or unsent output was first seen
};
static_assert(sizeof(Setup) == 160 && sizeof(Slot) == 16 && sizeof(Connection) == 32, "as in mod.rs");

constexpr u32 kSlotsPerBucket = 16, kMaxKey = 112, kMaxArguments = 64;
constexpr u32 kVacant = 0, kText = 1, kNumber = 2;
constexpr i64 kMaxNumber = 999999999999999999;  // largest absolute value that can still be changed
constexpr u64 kPollTimeout = 50ull * 1000 * 1000;

struct Command {
    u32 count, used;
    u32 at[kMaxArguments], length[kMaxArguments];
};

WARPWIRE_FN Counts *counts_of(const Setup &setup) { return reinterpret_cast<Counts *>(setup.counts); }
WARPWIRE_FN u8 *in_of(const Setup &, Connection *c) { return reinterpret_cast<u8 *>(c + 1); }
WARPWIRE_FN u8 *out_of(const Setup &setup, Connection *c) { return in_of(setup, c) + setup.in_size; }
WARPWIRE_FN u8 *key_of(Slot *slot) { return reinterpret_cast<u8 *>(slot + 1); }
WARPWIRE_FN u8 *value_of(Slot *slot) { return key_of(slot) + kMaxKey; }
// The integer of a slot that is kNumber, in place of the text.
WARPWIRE_FN u64 *number_of(Slot *slot) { return reinterpret_cast<u64 *>(value_of(slot)); }

// ------------------------------------------------------------------------------------------------
// RESP

enum Parsed : int { kMore = 0, kWhole = 1, kBadCount = -1, kBadLength = -2, kBadType = -3 };

// Parses a decimal number up to "\r\n". Returns the position behind it; 0 if incomplete, ~0 if
// malformed.
WARPWIRE_CALL u32 number(const u8 *bytes, u32 at, u32 end, i64 *value) {
    bool negative = at < end && bytes[at] == '-';
    u32 begin = at + negative;
    i64 sum = 0;
    for (at = begin; at < end && bytes[at] != '\r'; at++) {
        if (bytes[at] < '0' || bytes[at] > '9' || at - begin > 9) return ~0u;
        sum = sum * 10 + (bytes[at] - '0');
    }
    if (at + 1 >= end) return at - begin > 10 ? ~0u : 0;
    if (at == begin || bytes[at + 1] != '\n') return ~0u;
    *value = negative ? -sum : sum;
    return at + 2;
}

// An inline command: arguments on one line, separated by spaces.
WARPWIRE_CALL int parse_line(const u8 *bytes, u32 end, u32 max_length, Command *command) {
    u32 at = 0;
    command->count = 0;
    while (at < end && bytes[at] != '\n') {
        bool space = bytes[at] == ' ' || bytes[at] == '\r';
        bool begins = !space && (at == 0 || bytes[at - 1] == ' ');
        if (begins && command->count == kMaxArguments) return kBadCount;
        if (begins) command->at[command->count] = at, command->length[command->count++] = 0;
        if (!space) command->length[command->count - 1]++;
        at++;
    }
    command->used = at + 1;
    return at < end ? kWhole : end >= max_length ? kBadLength : kMore;
}

WARPWIRE_CALL int parse(const u8 *bytes, u32 end, u32 max_argument, u32 max_length, Command *command) {
    if (end == 0) return kMore;
    if (bytes[0] != '*') return parse_line(bytes, end, max_length, command);
    i64 value = 0;
    u32 at = number(bytes, 1, end, &value);
    if (at == ~0u || (at && (value < 0 || value > kMaxArguments))) return kBadCount;
    if (!at) return kMore;
    command->count = static_cast<u32>(value);
    for (u32 i = 0; i < command->count; i++) {
        if (at >= end) return kMore;
        if (bytes[at] != '$') return kBadType;
        at = number(bytes, at + 1, end, &value);
        if (at == ~0u || (at && (value < 0 || value > max_argument))) return kBadLength;
        if (!at) return kMore;
        command->at[i] = at, command->length[i] = static_cast<u32>(value);
        if (at + value + 2 > max_length) return kBadLength;
        if (at + value + 2 > end) return kMore;
        if (bytes[at + value] != '\r' || bytes[at + value + 1] != '\n') return kBadLength;
        at += static_cast<u32>(value) + 2;
    }
    command->used = at;
    return kWhole;
}

WARPWIRE_CALL bool is(const u8 *bytes, u32 length, const char *name) {
    u32 i = 0;
    for (; i < length && name[i]; i++)
        if ((bytes[i] & 0xdf) != name[i]) return false;
    return i == length && !name[i];
}

// Appends to the output; rank 0 only.
struct Writer {
    u8 *bytes;
    u32 length;
    WARPWIRE_CALL void text(const char *words) {
        while (*words) bytes[length++] = static_cast<u8>(*words++);
    }
    WARPWIRE_CALL void decimal(i64 value) {
        u8 digits[20];
        u32 n = 0;
        u64 rest = value < 0 ? 0 - static_cast<u64>(value) : static_cast<u64>(value);
        do digits[n++] = static_cast<u8>('0' + rest % 10), rest /= 10;
        while (rest);
        if (value < 0) bytes[length++] = '-';
        while (n) bytes[length++] = digits[--n];
    }
    WARPWIRE_CALL void integer(i64 value) { text(":"), decimal(value), text("\r\n"); }
    WARPWIRE_CALL void head(char sort, i64 value) { bytes[length++] = static_cast<u8>(sort), decimal(value), text("\r\n"); }
};

// ------------------------------------------------------------------------------------------------
// The store: buckets of slots, with a reader-writer lock per bucket. Increments of existing
// integers take the read lock: they are atomic, so that several workers can count at one key
// concurrently.

WARPWIRE_CALL u32 hash_of(const u8 *key, u32 length) {
    u32 hash = 2166136261u;
    for (u32 i = 0; i < length; i++) hash = (hash ^ key[i]) * 16777619u;
    return hash ^ hash >> 15;
}

WARPWIRE_FN Slot *slot_at(const Setup &setup, u32 hash, u32 i) {
    u64 bucket = hash & setup.bucket_mask;
    return reinterpret_cast<Slot *>(setup.slots + (bucket * kSlotsPerBucket + i) * setup.slot_size);
}

// A lock word: kReader per reader, and one bit for the writer that holds it or waits for it.
// Waiters only load it.
constexpr u32 kWriter = 1, kReader = 2;

#if WARPWIRE_CUDA
WARPWIRE_FN u32 add_to(u32 *word, u32 by) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(by) : "memory");
    return before;
}
WARPWIRE_FN u32 set_bit(u32 *word, u32 bit) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.or.b32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(bit) : "memory");
    return before;
}
#else
inline u32 add_to(u32 *word, u32 by) { return __atomic_fetch_add(word, by, __ATOMIC_ACQ_REL); }
inline u32 set_bit(u32 *word, u32 bit) { return __atomic_fetch_or(word, bit, __ATOMIC_ACQ_REL); }
#endif

WARPWIRE_FN u32 *lock_of(const Setup &setup, u32 hash) { return reinterpret_cast<u32 *>(setup.locks) + (hash & setup.bucket_mask); }
WARPWIRE_CALL void begin_reading(const Setup &setup, u32 hash) {
    u32 *lock = lock_of(setup, hash);
    while (add_to(lock, kReader) & kWriter) {
        add_to(lock, 0 - kReader);
        while (sock::detail::load_gpu(lock) & kWriter) sock::detail::poll_backoff();
    }
}
WARPWIRE_CALL void begin_writing(const Setup &setup, u32 hash) {
    u32 *lock = lock_of(setup, hash);
    while (set_bit(lock, kWriter) & kWriter)
        while (sock::detail::load_gpu(lock) & kWriter) sock::detail::poll_backoff();
    // The bit keeps new readers out; wait for the current ones.
    while (sock::detail::load_gpu(lock) != kWriter) sock::detail::poll_backoff();
}
WARPWIRE_FN void end_reading(const Setup &setup, u32 hash) { add_to(lock_of(setup, hash), 0 - kReader); }
WARPWIRE_FN void end_writing(const Setup &setup, u32 hash) { add_to(lock_of(setup, hash), 0 - kWriter); }

// The key's slot, or a free one if `make`, or none. Needs the read lock, or the write lock if
// `make`.
WARPWIRE_CALL Slot *slot_of(const Setup &setup, const u8 *key, u32 length, u32 hash, bool make) {
    Slot *vacant = nullptr;
    for (u32 i = 0; i < kSlotsPerBucket; i++) {
        Slot *slot = slot_at(setup, hash, i);
        if (!slot->used) {
            if (!vacant) vacant = slot;
            continue;
        }
        if (slot->hash != hash || slot->key_length != length) continue;
        u32 same = 0;
        while (same < length && key_of(slot)[same] == key[same]) same++;
        if (same == length) return slot;
    }
    return make ? vacant : nullptr;
}

WARPWIRE_CALL void take_slot(const Setup &setup, Slot *slot, const u8 *key, u32 length, u32 hash) {
    if (slot->used) return;
    slot->used = kText, slot->hash = hash, slot->key_length = length;
    for (u32 i = 0; i < length; i++) key_of(slot)[i] = key[i];
    count(&counts_of(setup)->keys, 1);
}

WARPWIRE_CALL void set(const Setup &setup, const u8 *key, u32 key_length, const u8 *value, u32 length, Writer *out) {
    u32 hash = hash_of(key, key_length);
    begin_writing(setup, hash);
    Slot *slot = slot_of(setup, key, key_length, hash, true);
    if (slot) {
        take_slot(setup, slot, key, key_length, hash);
        for (u32 i = 0; i < length; i++) value_of(slot)[i] = value[i];
        slot->used = kText, slot->value_length = length;
    }
    end_writing(setup, hash);
    out->text(slot ? "+OK\r\n" : "-OOM the store has no room for this key\r\n");
}

WARPWIRE_CALL void get(const Setup &setup, const u8 *key, u32 key_length, Writer *out) {
    u32 hash = hash_of(key, key_length);
    begin_reading(setup, hash);
    Slot *slot = slot_of(setup, key, key_length, hash, false);
    if (slot && slot->used == kNumber) {
        u8 text[20];
        Writer digits = {text, 0};
        digits.decimal(static_cast<i64>(sock::detail::load_gpu(number_of(slot))));
        out->head('$', digits.length);
        for (u32 i = 0; i < digits.length; i++) out->bytes[out->length++] = text[i];
        out->text("\r\n");
    } else if (slot) {
        out->head('$', slot->value_length);
        for (u32 i = 0; i < slot->value_length; i++) out->bytes[out->length++] = value_of(slot)[i];
        out->text("\r\n");
    } else {
        out->text("$-1\r\n");
    }
    end_reading(setup, hash);
}

WARPWIRE_CALL u32 exists(const Setup &setup, const u8 *key, u32 key_length) {
    u32 hash = hash_of(key, key_length);
    begin_reading(setup, hash);
    Slot *slot = slot_of(setup, key, key_length, hash, false);
    end_reading(setup, hash);
    return slot != nullptr;
}

WARPWIRE_CALL u32 drop(const Setup &setup, const u8 *key, u32 key_length) {
    u32 hash = hash_of(key, key_length);
    begin_writing(setup, hash);
    Slot *slot = slot_of(setup, key, key_length, hash, false);
    if (slot) slot->used = kVacant, count(&counts_of(setup)->keys, ~0ull);
    end_writing(setup, hash);
    return slot != nullptr;
}

// Parses a decimal integer of at most 18 digits; false if malformed.
WARPWIRE_CALL bool whole(const u8 *bytes, u32 length, i64 *value) {
    bool negative = length && bytes[0] == '-';
    if (length == negative || length > 18u + negative) return false;
    i64 sum = 0;
    for (u32 i = negative; i < length; i++) {
        if (bytes[i] < '0' || bytes[i] > '9') return false;
        sum = sum * 10 + (bytes[i] - '0');
    }
    *value = negative ? -sum : sum;
    return true;
}

// Adds to an integer, with the read or write lock; false if it is out of range.
WARPWIRE_CALL bool add_to_number(Slot *slot, i64 by, i64 *sum) {
    i64 before = static_cast<i64>(count(number_of(slot), static_cast<u64>(by)));
    *sum = before + by;
    if (before <= kMaxNumber && before >= -kMaxNumber) return true;
    count(number_of(slot), static_cast<u64>(-by));
    return false;
}

WARPWIRE_CALL void add(const Setup &setup, const u8 *key, u32 key_length, i64 by, Writer *out) {
    u32 hash = hash_of(key, key_length);
    i64 value = 0;
    begin_reading(setup, hash);
    Slot *slot = slot_of(setup, key, key_length, hash, false);
    bool is_number = slot && slot->used == kNumber, good = is_number && add_to_number(slot, by, &value);
    end_reading(setup, hash);
    if (!is_number) {
        // Convert the text to an integer, if possible.
        begin_writing(setup, hash);
        slot = slot_of(setup, key, key_length, hash, true);
        is_number = slot && slot->used == kNumber;  // another worker may have done so already
        good = slot && (is_number || !slot->used || whole(value_of(slot), slot->value_length, &value));
        if (good && !is_number) {
            take_slot(setup, slot, key, key_length, hash);
            sock::detail::store_gpu(number_of(slot), static_cast<u64>(value));
            slot->used = kNumber;
        }
        if (good) good = add_to_number(slot, by, &value);
        end_writing(setup, hash);
    }
    if (good) out->integer(value);
    else out->text(slot ? "-ERR value is not an integer or out of range\r\n" : "-OOM the store has no room for this key\r\n");
}

// ------------------------------------------------------------------------------------------------
// Commands

// Maximum length of the reply in bytes.
WARPWIRE_FN u64 reply_room(const Setup &setup, const Command &command) {
    return (setup.max_value + 32) * (command.count > 1 ? command.count : 1) + 128;
}

// Executes a command; rank 0 only. True if the connection is to be closed after it.
WARPWIRE_CALL bool execute(const Setup &setup, const u8 *in, const Command &command, Writer *out) {
    if (command.count == 0) return false;
    const u8 *name = in + command.at[0], *first = in + command.at[1];
    u32 length = command.length[0], first_length = command.count > 1 ? command.length[1] : 0;
    auto named = [&](const char *word) { return is(name, length, word); };
    bool keyed = named("GET") || named("SET") || named("DEL") || named("INCR") || named("DECR") || named("MGET") || named("EXISTS");
    if (keyed && command.count < (named("SET") ? 3u : 2u)) {
        out->text("-ERR wrong number of arguments\r\n");
        return false;
    }
    for (u32 i = 1; keyed && i < command.count && !(named("SET") && i > 1); i++) {
        if (command.length[i] <= kMaxKey) continue;
        out->text("-ERR the key is too long\r\n");
        return false;
    }
    if (named("GET")) get(setup, first, first_length, out);
    else if (named("SET") && command.count > 3) out->text("-ERR syntax error\r\n");
    else if (named("SET") && command.length[2] > setup.max_value) out->text("-ERR the value is too long\r\n");
    else if (named("SET")) set(setup, first, first_length, in + command.at[2], command.length[2], out);
    else if (named("INCR") || named("DECR")) add(setup, first, first_length, named("INCR") ? 1 : -1, out);
    else if (named("DEL") || named("EXISTS")) {
        i64 found = 0;
        for (u32 i = 1; i < command.count; i++) {
            const u8 *key = in + command.at[i];
            found += named("DEL") ? drop(setup, key, command.length[i]) : exists(setup, key, command.length[i]);
        }
        out->integer(found);
    } else if (named("MGET")) {
        out->head('*', command.count - 1);
        for (u32 i = 1; i < command.count; i++) get(setup, in + command.at[i], command.length[i], out);
    } else if ((named("PING") && command.count > 1) || (named("ECHO") && command.count == 2)) {
        out->head('$', first_length);
        for (u32 i = 0; i < first_length; i++) out->bytes[out->length++] = first[i];
        out->text("\r\n");
    } else if (named("PING")) out->text("+PONG\r\n");
    else if (named("DBSIZE")) out->integer(static_cast<i64>(sock::detail::load_gpu(&counts_of(setup)->keys)));
    else if (named("SELECT") || named("CLIENT") || named("QUIT")) out->text("+OK\r\n");
    else if (named("COMMAND") || named("CONFIG")) out->text("*0\r\n");
    else out->text("-ERR unknown command\r\n");
    return named("QUIT");
}

WARPWIRE_CALL const char *error_reply(int parsed) {
    if (parsed == kBadCount) return "-ERR Protocol error: invalid multibulk length\r\n";
    if (parsed == kBadType) return "-ERR Protocol error: expected '$'\r\n";
    return "-ERR Protocol error: invalid bulk length\r\n";
}

// Executes all complete commands; rank 0 only.
WARPWIRE_CALL void digest(const Setup &setup, Connection *c) {
    u8 *in = in_of(setup, c);
    Command command;
    Writer out = {out_of(setup, c), c->out_length};
    u32 done = 0, max_argument = static_cast<u32>(setup.max_value > kMaxKey ? setup.max_value : kMaxKey);
    u64 executed = 0;
    while (!c->closing) {
        int parsed = parse(in + done, c->in_length - done, max_argument, static_cast<u32>(setup.in_size), &command);
        if (parsed == kMore) break;
        if (parsed != kWhole) {
            if (out.length + 128 > setup.out_size) break;
            out.text(error_reply(parsed));
            c->closing = 1;
            count(&counts_of(setup)->refused, 1);
            break;
        }
        u64 needs = reply_room(setup, command);
        if (needs > setup.out_size) {
            if (out.length + 128 > setup.out_size) break;
            out.text("-ERR too many keys\r\n");
        } else {
            if (out.length + needs > setup.out_size) break;  // send the pending output first
            c->closing = execute(setup, in + done, command, &out);
        }
        executed++;
        done += command.used;
    }
    if (executed) count(&counts_of(setup)->commands, executed);
    for (u32 i = done; done && i < c->in_length; i++) in[i - done] = in[i];
    c->in_length -= done, c->out_length = out.length;
}

// ------------------------------------------------------------------------------------------------
// Workers

template <class Group> WARPWIRE_FN u32 field(Group group, const u32 *word) { return static_cast<u32>(group.broadcast(*word)); }

// Sends the pending output; false if the connection is to be closed.
template <class Group> WARPWIRE_CALL bool flush(const Table &table, const Setup &setup, Connection *c, Group group) {
    u32 at = field(group, &c->out_at), length = field(group, &c->out_length);
    if (at < length) {
        i64 sent = send(table, c->socket, out_of(setup, c) + at, length - at, group);
        if (sent < 0 && sent != -kEagain) return false;
        at += sent > 0 ? static_cast<u32>(sent) : 0;
    }
    group.sync();
    bool empty = at == length;
    if (group.rank() == 0) c->out_at = empty ? 0 : at, c->out_length = empty ? 0 : length;
    group.sync();
    return !(empty && field(group, &c->closing));
}

// Receives and executes commands; false if the connection is to be closed.
template <class Group> WARPWIRE_CALL bool converse(const Table &table, const Setup &setup, Connection *c, bool readable, Group group) {
    u64 now = group.rank() == 0 ? sock::detail::clock_ns() : 0;
    u32 have = field(group, &c->in_length);
    if (readable && have < setup.in_size && !field(group, &c->out_length)) {
        i64 count = recv(table, c->socket, in_of(setup, c) + have, setup.in_size - have, group);
        if (count == 0 || (count < 0 && count != -kEagain)) return false;
        if (group.rank() == 0 && count > 0) c->in_length = have + static_cast<u32>(count);
    }
    if (group.rank() == 0) digest(setup, c);
    group.sync();
    if (!flush(table, setup, c, group)) return false;
    bool late = false;
    if (group.rank() == 0) {
        bool busy = c->in_length || c->out_length;
        if (!busy) c->since = 0;
        else if (!c->since) c->since = now;
        late = busy && now - c->since > setup.idle_timeout;
    }
    return !group.any(late);
}

// Admits a client, or rejects it if the server is full or this worker has no free slot; 1 if
// admitted.
template <class Group> WARPWIRE_CALL u32 greet(const Table &table, const Setup &setup, int socket, Connection *c, Group group) {
    static const char kFull[] = "-ERR max number of clients reached\r\n";
    sock::set(table, socket, kNonBlocking, 1, group);
    bool welcome = false;
    if (c && group.rank() == 0) {
        welcome = count(&counts_of(setup)->clients, 1) < setup.max_clients;
        if (!welcome) count(&counts_of(setup)->clients, ~0ull);
    }
    if (!group.any(welcome)) {
        u8 text[sizeof kFull];
        for (u32 i = 0; i < sizeof kFull; i++) text[i] = static_cast<u8>(kFull[i]);
        if (group.rank() == 0) send(table, socket, text, sizeof kFull - 1, Thread());
        close(table, socket, group);
        return 0;
    }
    if (group.rank() == 0) *c = Connection{socket, 0, 0, 0, 0, 0, 0};
    group.sync();
    return 1;
}

template <class Group> WARPWIRE_CALL void serve(const Setup &setup, u32 worker, Group group) {
    const Table &table = *reinterpret_cast<const Table *>(setup.table);
    Control *control = reinterpret_cast<Control *>(setup.control);
    PollEntry *list = reinterpret_cast<PollEntry *>(setup.connections) + worker * (setup.per_worker + 1);
    u64 lists = (setup.workers * (setup.per_worker + 1) * sizeof(PollEntry) + 15) / 16 * 16;
    u8 *connections = reinterpret_cast<u8 *>(setup.connections + lists) + worker * setup.per_worker * setup.connection_size;
    auto at = [&](u32 i) { return reinterpret_cast<Connection *>(connections + i * setup.connection_size); };
    int listener = open_listener(table, control, setup.address, kStream, worker, group);
    if (listener < 0) return;
    u32 mine = 0;
    for (;;) {
        u64 clients = group.broadcast(group.rank() == 0 ? sock::detail::load_gpu(&counts_of(setup)->clients) : 0);
        if (group.broadcast(group.rank() == 0 ? sock::detail::load_system(&control->stop) : 0)) break;
        // Workers with no more than their share of clients accept the next one; if the server is
        // full, all of them accept, to reject.
        bool full = clients >= setup.max_clients, takes = full || (mine < setup.per_worker && mine * setup.workers <= clients);
        group.sync();
        for (u32 i = group.rank(); i < mine; i += group.size()) list[i] = PollEntry{at(i)->socket, at(i)->out_length ? kOut : kIn, 0};
        if (group.rank() == 0) list[mine] = PollEntry{listener, kIn, 0};
        i64 found = poll(table, list, mine + takes, takes ? kPollTimeout : kPollTimeout / 10, group);
        if (found < 0) return;
        bool arrived = takes && group.broadcast(list[mine].revents) != 0;
        for (u32 i = mine; i-- > 0;) {
            u32 events = static_cast<u32>(group.broadcast(list[i].revents));
            Connection *c = at(i);
            bool open = events ? converse(table, setup, c, events & ~static_cast<u32>(kOut), group) : true;
            bool late = false;
            if (!events && group.rank() == 0) late = c->since && sock::detail::clock_ns() - c->since > setup.idle_timeout;
            if (open && !group.any(late)) continue;
            close(table, c->socket, group);
            group.sync();
            if (group.rank() == 0) count(&counts_of(setup)->clients, ~0ull), count(&counts_of(setup)->closed, 1);
            mine--;
            if (i != mine) {
                // Move the last connection, and its list entry, to the free slot.
                sock::detail::copy<false>(group, reinterpret_cast<u8 *>(c), reinterpret_cast<u8 *>(at(mine)), setup.connection_size);
                if (group.rank() == 0) list[i] = list[mine];
            }
            group.sync();
        }
        if (!arrived) continue;
        int socket = accept(table, listener, nullptr, group);
        if (socket < 0) continue;
        mine += greet(table, setup, socket, mine < setup.per_worker ? at(mine) : nullptr, group);
    }
    for (u32 i = 0; i < mine; i++) close(table, at(i)->socket, group);
    if (worker == 0) close(table, listener, group);
}

}  // namespace

#if WARPWIRE_CUDA
extern "C" __global__ void kv_server(u64 setup) { serve(*reinterpret_cast<const Setup *>(setup), blockIdx.x, Block()); }
#else
extern "C" void kv_server_thread(u64 setup, u64 worker) { serve(*reinterpret_cast<const Setup *>(setup), static_cast<u32>(worker), Block()); }
#endif
