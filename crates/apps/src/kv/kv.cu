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
};
struct Counts {  // in device memory
    u64 clients, keys, commands, refused, closed;
};
struct Slot {
    u32 used, hash, key_length, value_length;  // used: kVacant, kText, kNumber
};
static_assert(sizeof(Setup) == 152 && sizeof(Slot) == 16, "as in mod.rs");

constexpr u32 kSlotsPerBucket = 16, kMaxKey = 112, kMaxArguments = 64;
constexpr u32 kVacant = 0, kText = 1, kNumber = 2;
constexpr i64 kMaxNumber = 999999999999999999;  // largest absolute value that can still be changed

struct Command {
    u32 count, used;
    u32 at[kMaxArguments], length[kMaxArguments];
};

WARPWIRE_FN Counts *counts_of(const Setup &setup) { return reinterpret_cast<Counts *>(setup.counts); }
WARPWIRE_FN SocketKind kind_of(const Setup &) { return kStream; }
WARPWIRE_FN FullReply full_reply(const Setup &) {
    static const char kFull[] = "-ERR max number of clients reached\r\n";
    return FullReply{kFull, sizeof kFull - 1};
}
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

// In the order of the names below; the first seven take keys.
enum Name : u32 {
    kGet, kSet, kDel, kIncr, kDecr, kMget, kExists, kPing, kEcho, kDbsize, kSelect, kClient, kQuit, kCommand, kConfig, kUnknown,
};

WARPWIRE_CALL u32 name_of(const u8 *bytes, u32 length) {
    const char *name =
        "GET\0SET\0DEL\0INCR\0DECR\0MGET\0EXISTS\0PING\0ECHO\0DBSIZE\0SELECT\0CLIENT\0QUIT\0COMMAND\0CONFIG\0";
    u32 number = 0;
    for (; number < kUnknown; number++) {
        u32 i = 0;
        while (i < length && name[i] && (bytes[i] & 0xdf) == name[i]) i++;
        if (i == length && !name[i]) break;
        while (*name++) {
        }
    }
    return number;
}

// Also where `to` is before `from` and they overlap.
WARPWIRE_CALL void copy_bytes(u8 *to, const u8 *from, u32 length) {
    for (u32 i = 0; i < length; i++) to[i] = from[i];
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
    // A bulk string.
    WARPWIRE_CALL void string(const u8 *from, u32 count) {
        head('$', count);
        copy_bytes(bytes + length, from, count);
        length += count;
        text("\r\n");
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
    copy_bytes(key_of(slot), key, length);
    count(&counts_of(setup)->keys, 1);
}

WARPWIRE_CALL void set(const Setup &setup, const u8 *key, u32 key_length, const u8 *value, u32 length, Writer *out) {
    u32 hash = hash_of(key, key_length);
    begin_writing(setup, hash);
    Slot *slot = slot_of(setup, key, key_length, hash, true);
    if (slot) {
        take_slot(setup, slot, key, key_length, hash);
        copy_bytes(value_of(slot), value, length);
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
        out->string(text, digits.length);
    } else if (slot) {
        out->string(value_of(slot), slot->value_length);
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
    const u8 *first = in + command.at[1];
    u32 name = name_of(in + command.at[0], command.length[0]), first_length = command.count > 1 ? command.length[1] : 0;
    bool keyed = name <= kExists;
    if (keyed && command.count < (name == kSet ? 3u : 2u)) {
        out->text("-ERR wrong number of arguments\r\n");
        return false;
    }
    for (u32 i = 1; keyed && i < command.count && !(name == kSet && i > 1); i++) {
        if (command.length[i] <= kMaxKey) continue;
        out->text("-ERR the key is too long\r\n");
        return false;
    }
    if (name == kGet) get(setup, first, first_length, out);
    else if (name == kSet && command.count > 3) out->text("-ERR syntax error\r\n");
    else if (name == kSet && command.length[2] > setup.max_value) out->text("-ERR the value is too long\r\n");
    else if (name == kSet) set(setup, first, first_length, in + command.at[2], command.length[2], out);
    else if (name == kIncr || name == kDecr) add(setup, first, first_length, name == kIncr ? 1 : -1, out);
    else if (name == kDel || name == kExists) {
        i64 found = 0;
        for (u32 i = 1; i < command.count; i++) {
            const u8 *key = in + command.at[i];
            found += name == kDel ? drop(setup, key, command.length[i]) : exists(setup, key, command.length[i]);
        }
        out->integer(found);
    } else if (name == kMget) {
        out->head('*', command.count - 1);
        for (u32 i = 1; i < command.count; i++) get(setup, in + command.at[i], command.length[i], out);
    } else if ((name == kPing && command.count > 1) || (name == kEcho && command.count == 2)) {
        out->string(first, first_length);
    } else if (name == kPing) out->text("+PONG\r\n");
    else if (name == kDbsize) out->integer(static_cast<i64>(sock::detail::load_gpu(&counts_of(setup)->keys)));
    else if (name == kSelect || name == kClient || name == kQuit) out->text("+OK\r\n");
    else if (name == kCommand || name == kConfig) out->text("*0\r\n");
    else out->text("-ERR unknown command\r\n");
    return name == kQuit;
}

WARPWIRE_CALL const char *error_reply(int parsed) {
    if (parsed == kBadCount) return "-ERR Protocol error: invalid multibulk length\r\n";
    if (parsed == kBadType) return "-ERR Protocol error: expected '$'\r\n";
    return "-ERR Protocol error: invalid bulk length\r\n";
}

// Executes all complete commands; rank 0 only.
WARPWIRE_CALL void digest(const Setup &setup, Connection *c) {
    u8 *in = in_of(c);
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
    if (done) copy_bytes(in, in + done, c->in_length - done);
    c->in_length -= done, c->out_length = out.length;
}

template <class Group> WARPWIRE_FN void process(const Setup &setup, u32, Connection *c, Group group) {
    if (group.rank() == 0) digest(setup, c);
    group.sync();
}

}  // namespace

#if WARPWIRE_CUDA
extern "C" __global__ void kv_server(u64 setup) { serve(*reinterpret_cast<const Setup *>(setup), blockIdx.x, Block()); }
#else
extern "C" void kv_server_thread(u64 setup, u64 worker) { serve(*reinterpret_cast<const Setup *>(setup), static_cast<u32>(worker), Block()); }
#endif
