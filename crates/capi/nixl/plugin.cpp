// NIXL's backend WARPWIRE: turns NIXL's virtual calls into calls of libwarpwire.
//
// A NIXL agent has one ww_agent of the same name. Its connection information is the agent's
// address, the public data of memory is the metadata of that memory: both are added to the peer of
// that name. docs/nixl.md says how to use it.
#include "abi.h"

#include <cstdio>
#include <cstdlib>
#include <dirent.h>
#include <dlfcn.h>
#include <memory>
#include <shared_mutex>

#include <warpwire.h>

namespace {

constexpr const char *ANY_VERSION = "WARPWIRE_NIXL_ANY_VERSION";

void log_error(const char *what) {
    std::fprintf(stderr, "NIXL WARPWIRE: %s: %s\n", what, ww_last_error()->message);
}

// Logs the last error; returns what NIXL has for it.
nixl_status_t failed(const char *what, int status) {
    log_error(what);
    switch (status) {
    case WW_INVALID_ARGUMENT:
    case WW_MISALIGNED:
    case WW_MALFORMED:
    case WW_OUT_OF_RANGE: return NIXL_ERR_INVALID_PARAM;
    case WW_STALE:
    case WW_TIMEOUT:
    case WW_PEER_LOST: return NIXL_ERR_REMOTE_DISCONNECT;
    case WW_CANCELLED: return NIXL_ERR_CANCELED;
    case WW_UNSUPPORTED: return NIXL_ERR_NOT_SUPPORTED;
    default: return NIXL_ERR_BACKEND;
    }
}

// Memory that is registered here.
struct Local final : nixlBackendMD {
    Local() : nixlBackendMD(true) {}
    ww_memory *memory = nullptr;
};

// A peer's memory: transfers find it by its address, so there is nothing to keep.
struct Remote final : nixlBackendMD {
    Remote() : nixlBackendMD(false) {}
};

struct Request final : nixlBackendReqH {
    ~Request() override {
        if (transfer) ww_transfer_release(transfer);
        if (prepared) ww_prepared_release(prepared);
    }
    ww_prepared *prepared = nullptr;
    ww_transfer *transfer = nullptr;
    uint64_t bytes = 0;
    size_t count = 0;
};

class Engine final : public nixlBackendEngine {
    ww_agent *agent = nullptr;
    mutable std::shared_mutex mutex;
    std::unordered_map<std::string, ww_peer *> peers;

    static uint32_t number(const nixl_b_params_t &options, const char *name) {
        auto found = options.find(name);
        return found == options.end() ? 0 : uint32_t(std::strtoul(found->second.c_str(), nullptr, 10));
    }

    // Adds what these bytes say to the peer. They must be of an agent of that name.
    nixl_status_t add(const std::string &name, const void *bytes, size_t len) {
        ww_peer *peer = nullptr;
        if (int status = ww_agent_add_peer(agent, bytes, len, &peer))
            return failed("metadata of a peer", status);
        ww_peer_info *info = nullptr;
        bool same = ww_peer_describe(peer, &info) == WW_OK && name == info->name;
        ww_free(info);
        if (!same) {
            std::fprintf(stderr, "NIXL WARPWIRE: the metadata is not of agent %s\n", name.c_str());
            ww_peer_release(peer);
            return NIXL_ERR_MISMATCH;
        }
        std::unique_lock lock(mutex);
        ww_peer *&known = peers[name];
        if (known) ww_peer_release(known);
        known = peer;
        return NIXL_SUCCESS;
    }

    // Calls `use` with the peer, which is not released meanwhile.
    template <class Use> nixl_status_t with_peer(const std::string &name, Use use) const {
        std::shared_lock lock(mutex);
        auto found = peers.find(name);
        if (found == peers.end()) {
            std::fprintf(stderr, "NIXL WARPWIRE: agent %s is unknown; load its metadata\n",
                         name.c_str());
            return NIXL_ERR_NOT_FOUND;
        }
        return use(found->second);
    }

    nixl_status_t metadata(const ww_memory *memory, std::string &to) const {
        void *bytes = nullptr;
        size_t len = 0;
        if (int status = ww_agent_metadata_of(agent, &memory, memory ? 1 : 0, &bytes, &len))
            return failed("metadata", status);
        to.assign(static_cast<char *>(bytes), len);
        ww_free(bytes);
        return NIXL_SUCCESS;
    }

    static std::vector<ww_range> ranges(const nixl_meta_dlist_t &list) {
        std::vector<ww_range> made;
        made.reserve(list.descs.size());
        for (const nixlMetaDesc &desc : list.descs) made.push_back({desc.addr, desc.len});
        return made;
    }

    static nixl_status_t state(const Request &request) {
        int status = ww_transfer_state(request.transfer);
        if (status == WW_OK) return NIXL_SUCCESS;
        return status == WW_IN_PROGRESS ? NIXL_IN_PROG : failed("transfer", status);
    }

public:
    explicit Engine(const nixlBackendInitParams *init) : nixlBackendEngine(init) {
        const nixl_b_params_t &given = *init->customParams;
        auto text = [&](const char *name) -> const char * {
            auto found = given.find(name);
            return found == given.end() || found->second.empty() ? nullptr : found->second.c_str();
        };
        ww_agent_options options = WW_AGENT_OPTIONS_INIT;
        options.link = text("link");
        options.address = text("address");
        options.engines = number(given, "engines");
        options.queue_pairs = number(given, "queue_pairs");
        options.send_depth = number(given, "send_depth");
        if (ww_agent_open(localAgent.c_str(), &options, &agent)) {
            log_error("cannot create the backend");
            initErr = true;
        }
    }

    ~Engine() override {
        for (auto &[name, peer] : peers) ww_peer_release(peer);
        if (agent) ww_agent_close(agent);
    }

    bool supportsRemote() const override { return true; }
    bool supportsLocal() const override { return true; }
    bool supportsNotif() const override { return true; }
    nixl_mem_list_t getSupportedMems() const override { return {DRAM_SEG, VRAM_SEG}; }

    nixl_status_t registerMem(const nixlBlobDesc &desc, const nixl_mem_t &kind,
                              nixlBackendMD *&out) override {
        if (kind != DRAM_SEG && kind != VRAM_SEG) return NIXL_ERR_NOT_SUPPORTED;
        auto made = std::make_unique<Local>();
        int status = ww_agent_register(agent, desc.addr, desc.len, WW_ACCESS_ALL, &made->memory);
        if (status) return failed("register memory", status);
        out = made.release();
        return NIXL_SUCCESS;
    }

    nixl_status_t deregisterMem(nixlBackendMD *meta) override {
        std::unique_ptr<Local> local(static_cast<Local *>(meta));
        int status = ww_memory_deregister(local->memory);
        return status ? failed("deregister memory", status) : NIXL_SUCCESS;
    }

    // Adding a peer connects.
    nixl_status_t connect(const std::string &name) override {
        if (name != localAgent)
            return with_peer(name, [](ww_peer *) { return NIXL_SUCCESS; });
        std::string own;
        nixl_status_t status = metadata(nullptr, own);
        return status ? status : add(name, own.data(), own.size());
    }

    nixl_status_t disconnect(const std::string &name) override {
        std::unique_lock lock(mutex);
        auto found = peers.find(name);
        if (found == peers.end()) return NIXL_ERR_NOT_FOUND;
        ww_agent_remove_peer(agent, name.c_str());
        ww_peer_release(found->second);
        peers.erase(found);
        return NIXL_SUCCESS;
    }

    nixl_status_t getConnInfo(std::string &to) const override { return metadata(nullptr, to); }

    nixl_status_t loadRemoteConnInfo(const std::string &name, const std::string &info) override {
        return add(name, info.data(), info.size());
    }

    nixl_status_t getPublicData(const nixlBackendMD *meta, std::string &to) const override {
        return metadata(static_cast<const Local *>(meta)->memory, to);
    }

    nixl_status_t loadRemoteMD(const nixlBlobDesc &desc, const nixl_mem_t &kind,
                               const std::string &name, nixlBackendMD *&out) override {
        if (kind != DRAM_SEG && kind != VRAM_SEG) return NIXL_ERR_NOT_SUPPORTED;
        nixl_status_t status = add(name, desc.metaInfo.data(), desc.metaInfo.size());
        if (status == NIXL_SUCCESS) out = new Remote;
        return status;
    }

    nixl_status_t loadLocalMD(nixlBackendMD *in, nixlBackendMD *&out) override {
        std::string own;
        nixl_status_t status = metadata(static_cast<Local *>(in)->memory, own);
        if (status == NIXL_SUCCESS) status = add(localAgent, own.data(), own.size());
        if (status == NIXL_SUCCESS) out = new Remote;
        return status;
    }

    nixl_status_t unloadMD(nixlBackendMD *meta) override {
        delete meta;
        return NIXL_SUCCESS;
    }

    nixl_status_t prepXfer(const nixl_xfer_op_t &, const nixl_meta_dlist_t &local,
                           const nixl_meta_dlist_t &remote, const std::string &name,
                           nixlBackendReqH *&out, const nixl_opt_b_args_t *) const override {
        if (local.descs.size() != remote.descs.size()) return NIXL_ERR_MISMATCH;
        std::vector<ww_range> here = ranges(local), there = ranges(remote);
        auto made = std::make_unique<Request>();
        made->count = here.size();
        for (const ww_range &range : here) made->bytes += range.len;
        nixl_status_t status = with_peer(name, [&](ww_peer *peer) {
            int status = ww_agent_prepare(agent, peer, here.data(), there.data(), here.size(),
                                          &made->prepared);
            return status ? failed("prepare a transfer", status) : NIXL_SUCCESS;
        });
        if (status == NIXL_SUCCESS) out = made.release();
        return status;
    }

    nixl_status_t postXfer(const nixl_xfer_op_t &op, const nixl_meta_dlist_t &,
                           const nixl_meta_dlist_t &, const std::string &, nixlBackendReqH *&handle,
                           const nixl_opt_b_args_t *args) const override {
        auto *request = static_cast<Request *>(handle);
        ww_transfer_options options = WW_TRANSFER_OPTIONS_INIT;
        if (args && args->hasNotif) {
            options.notification = args->notifMsg.data();
            options.notification_len = args->notifMsg.size();
        }
        if (request->transfer) ww_transfer_release(request->transfer);
        request->transfer = nullptr;
        int status = ww_agent_post(agent, op == NIXL_READ ? WW_READ : WW_WRITE, request->prepared,
                                   &options, &request->transfer);
        return status ? failed("post a transfer", status) : state(*request);
    }

    nixl_status_t checkXfer(nixlBackendReqH *handle) const override {
        auto *request = static_cast<Request *>(handle);
        return request->transfer ? state(*request) : NIXL_ERR_NOT_POSTED;
    }

    // A transfer in progress is cancelled; it keeps its memory registered until it has ended.
    nixl_status_t releaseReqH(nixlBackendReqH *handle) const override {
        auto *request = static_cast<Request *>(handle);
        if (request->transfer) ww_transfer_cancel(request->transfer);
        delete request;
        return NIXL_SUCCESS;
    }

    nixl_status_t getNotifs(notif_list_t &list) override {
        for (;;) {
            ww_notification *next = nullptr;
            if (int status = ww_agent_next_notification(agent, 0, &next))
                return failed("notifications", status);
            if (!next) return NIXL_SUCCESS;
            list.emplace_back(next->from,
                              std::string(static_cast<const char *>(next->bytes), next->len));
            ww_free(next);
        }
    }

    nixl_status_t genNotif(const std::string &name, const std::string &message) const override {
        return with_peer(name, [&](ww_peer *peer) {
            int status = ww_agent_notify(agent, peer, message.data(), message.size(), nullptr);
            return status ? failed("notify", status) : NIXL_SUCCESS;
        });
    }

    // Whether memory can be registered, and how it would be reached: by registering it.
    nixl_status_t queryMem(const nixl_reg_dlist_t &list,
                           std::vector<nixl_query_resp_t> &answers) const override {
        answers.clear();
        for (const nixlBlobDesc &desc : list.descs) {
            ww_memory *memory = nullptr;
            ww_memory_info *info = nullptr;
            nixl_query_resp_t answer;
            if (ww_agent_register(agent, desc.addr, desc.len, WW_ACCESS_ALL, &memory) == WW_OK) {
                if (ww_memory_describe(memory, &info) == WW_OK)
                    answer = nixl_b_params_t{
                        {"kind", info->kind}, {"path", info->path}, {"why", info->why}};
                ww_free(info);
                ww_memory_deregister(memory);
            }
            answers.push_back(std::move(answer));
        }
        return NIXL_SUCCESS;
    }

    // By a model of one queue pair: 5 us, 0.2 us per range, 10 GB/s.
    nixl_status_t estimateXferCost(const nixl_xfer_op_t &, const nixl_meta_dlist_t &,
                                   const nixl_meta_dlist_t &, const std::string &,
                                   nixlBackendReqH *const &handle,
                                   std::chrono::microseconds &duration,
                                   std::chrono::microseconds &margin, nixl_cost_t &method,
                                   const void *) const override {
        const auto *request = static_cast<const Request *>(handle);
        duration = std::chrono::microseconds(5 + request->count / 5 + request->bytes / 10000);
        margin = duration / 2;
        method = ANALYTICAL_BACKEND;
        return NIXL_SUCCESS;
    }
};

// The version of NIXL that has loaded us: by the name of the package's folder beside the one of
// libnixl.so (nixl_cu12-1.5.1.dist-info). Empty if there is none, as in builds from source.
std::string nixl_version(const void *caller) {
    Dl_info info;
    if (!dladdr(caller, &info) || !info.dli_fname) return {};
    std::string path = info.dli_fname;
    for (int up = 0; up < 2; up++) path = path.substr(0, path.find_last_of('/'));
    DIR *folder = opendir(path.c_str());
    std::string found;
    while (folder) {
        dirent *entry = readdir(folder);
        if (!entry) break;
        std::string name = entry->d_name;
        size_t end = name.find(".dist-info"), dash = name.find('-');
        bool is_nixl = name.rfind("nixl_cu", 0) == 0 || name.rfind("nixl-", 0) == 0;
        if (is_nixl && end != std::string::npos && dash < end)
            found = name.substr(dash + 1, end - dash - 1);
    }
    if (folder) closedir(folder);
    return found;
}

bool is_known(const std::string &version) {
    int major = -1, minor = -1;
    return std::sscanf(version.c_str(), "%d.%d", &major, &minor) == 2 && major == 1 && minor <= 5;
}

nixlBackendEngine *create(const nixlBackendInitParams *init) {
    try {
        return new Engine(init);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "NIXL WARPWIRE: cannot create the backend: %s\n", error.what());
        return nullptr;
    }
}

} // namespace

extern "C" __attribute__((visibility("default"))) nixlBackendPlugin *nixl_plugin_init() {
    static nixlBackendPlugin plugin = {
        1,
        create,
        [](nixlBackendEngine *engine) { delete engine; },
        [] { return "WARPWIRE"; },
        [] { return WARPWIRE_PLUGIN_VERSION; },
        [] {
            return nixl_b_params_t{{"link", ""},        {"address", ""},    {"engines", ""},
                                   {"queue_pairs", ""}, {"send_depth", ""}};
        },
        [] { return nixl_mem_list_t{DRAM_SEG, VRAM_SEG}; },
    };
    const char *any = std::getenv(ANY_VERSION);
    std::string version = nixl_version(__builtin_return_address(0));
    if (!is_known(version) && !(any && *any && *any != '0')) {
        std::fprintf(stderr,
                     "NIXL WARPWIRE: cannot be used with NIXL %s: its layouts are known for 1.0 to "
                     "1.5; install such a wheel, or set %s=1 to try\n",
                     version.empty() ? "of unknown version" : version.c_str(), ANY_VERSION);
        return nullptr;
    }
    if (ww_version() / 100 != WW_VERSION / 100) {
        std::fprintf(stderr,
                     "NIXL WARPWIRE: libwarpwire.so is version %u and not %d; install both together\n",
                     ww_version(), WW_VERSION);
        return nullptr;
    }
    return &plugin;
}

extern "C" __attribute__((visibility("default"))) void nixl_plugin_fini() {}
