// What a backend of NIXL 1.0 to 1.5 shares with it: types that cross the boundary, in its layout.
//
// Names, order and types are NIXL's; everything else is ours. Virtual functions are called by their
// place in the table, so that their order matters. The assertions below are of x86-64 and AArch64
// with libstdc++.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

enum nixl_mem_t : int { DRAM_SEG = 0, VRAM_SEG = 1 };
enum nixl_xfer_op_t : int { NIXL_READ = 0, NIXL_WRITE = 1 };
enum nixl_cost_t : int { ANALYTICAL_BACKEND = 0 };

enum nixl_status_t : int {
    NIXL_IN_PROG = 1,
    NIXL_SUCCESS = 0,
    NIXL_ERR_NOT_POSTED = -1,
    NIXL_ERR_INVALID_PARAM = -2,
    NIXL_ERR_BACKEND = -3,
    NIXL_ERR_NOT_FOUND = -4,
    NIXL_ERR_MISMATCH = -5,
    NIXL_ERR_NOT_ALLOWED = -6,
    NIXL_ERR_NOT_SUPPORTED = -9,
    NIXL_ERR_REMOTE_DISCONNECT = -10,
    NIXL_ERR_CANCELED = -11,
};

using nixl_b_params_t = std::unordered_map<std::string, std::string>;
using nixl_mem_list_t = std::vector<nixl_mem_t>;
using nixl_query_resp_t = std::optional<nixl_b_params_t>;
using notif_list_t = std::vector<std::pair<std::string, std::string>>;

struct nixlBasicDesc {
    uintptr_t addr;
    size_t len;
    uint64_t devId;
};

struct nixlBlobDesc : nixlBasicDesc {
    std::string metaInfo;
};

// What a backend keeps of registered memory, its own or a peer's.
class nixlBackendMD {
public:
    explicit nixlBackendMD(bool is_private) : isPrivateMD(is_private) {}
    virtual ~nixlBackendMD() = default;

protected:
    bool isPrivateMD;
};

// What a backend keeps of a transfer.
class nixlBackendReqH {
public:
    virtual ~nixlBackendReqH() = default;
};

struct nixlMetaDesc : nixlBasicDesc {
    nixlBackendMD *metadataP;
};

// Only read here, never made.
template <class T> struct nixlDescList {
    virtual ~nixlDescList() = default;
    nixl_mem_t type;
    std::vector<T> descs;
};
using nixl_meta_dlist_t = nixlDescList<nixlMetaDesc>;
using nixl_reg_dlist_t = nixlDescList<nixlBlobDesc>;

struct nixl_opt_b_args_t {
    std::string notifMsg;
    bool hasNotif;
    std::string customParam;
};

struct nixlBackendInitParams {
    std::string localAgent;
    std::string type;
    nixl_b_params_t *customParams;
    bool enableProgTh;
    uint64_t pthrDelay;
    int syncMode;
    bool enableTelemetry;
};

class nixlBackendEngine {
    std::string backendType;
    nixl_b_params_t customParams;
    struct Event {
        uint64_t words[2];
    };
    std::vector<Event> telemetryEvents;
    std::mutex telemetryMutex;

protected:
    bool initErr = false;
    const std::string localAgent;
    const bool enableTelemetry;

public:
    explicit nixlBackendEngine(const nixlBackendInitParams *init)
        : backendType(init->type), customParams(*init->customParams), localAgent(init->localAgent),
          enableTelemetry(init->enableTelemetry) {}

    virtual ~nixlBackendEngine() = default;
    virtual bool supportsRemote() const = 0;
    virtual bool supportsLocal() const = 0;
    virtual bool supportsNotif() const = 0;
    virtual nixl_mem_list_t getSupportedMems() const = 0;
    virtual nixl_status_t registerMem(const nixlBlobDesc &, const nixl_mem_t &, nixlBackendMD *&) = 0;
    virtual nixl_status_t deregisterMem(nixlBackendMD *) = 0;
    virtual nixl_status_t connect(const std::string &) = 0;
    virtual nixl_status_t disconnect(const std::string &) = 0;
    virtual nixl_status_t unloadMD(nixlBackendMD *) = 0;
    virtual nixl_status_t prepXfer(const nixl_xfer_op_t &, const nixl_meta_dlist_t &,
                                   const nixl_meta_dlist_t &, const std::string &,
                                   nixlBackendReqH *&, const nixl_opt_b_args_t *) const = 0;
    virtual nixl_status_t postXfer(const nixl_xfer_op_t &, const nixl_meta_dlist_t &,
                                   const nixl_meta_dlist_t &, const std::string &,
                                   nixlBackendReqH *&, const nixl_opt_b_args_t *) const = 0;
    virtual nixl_status_t checkXfer(nixlBackendReqH *) const = 0;
    virtual nixl_status_t releaseReqH(nixlBackendReqH *) const = 0;
    // Memory views for kernels, of a peer's memory and of ours.
    virtual nixl_status_t prepMemView(const void *, void *&, const void *) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual nixl_status_t prepMemView(const nixl_meta_dlist_t &, void *&, const void *) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual void releaseMemView(void *) const {}
    virtual nixl_status_t getPublicData(const nixlBackendMD *, std::string &) const = 0;
    virtual nixl_status_t getConnInfo(std::string &) const = 0;
    virtual nixl_status_t loadRemoteConnInfo(const std::string &, const std::string &) = 0;
    virtual nixl_status_t loadRemoteMD(const nixlBlobDesc &, const nixl_mem_t &,
                                       const std::string &, nixlBackendMD *&) = 0;
    virtual nixl_status_t loadLocalMD(nixlBackendMD *, nixlBackendMD *&) = 0;
    virtual nixl_status_t getNotifs(notif_list_t &) = 0;
    virtual nixl_status_t genNotif(const std::string &, const std::string &) const = 0;
    virtual nixl_status_t queryMem(const nixl_reg_dlist_t &,
                                   std::vector<nixl_query_resp_t> &) const = 0;
    virtual nixl_status_t
    estimateXferCost(const nixl_xfer_op_t &, const nixl_meta_dlist_t &, const nixl_meta_dlist_t &,
                     const std::string &, nixlBackendReqH *const &, std::chrono::microseconds &,
                     std::chrono::microseconds &, nixl_cost_t &, const void *) const = 0;
};

struct nixlBackendPlugin {
    int api_version;
    nixlBackendEngine *(*create_engine)(const nixlBackendInitParams *);
    void (*destroy_engine)(nixlBackendEngine *);
    const char *(*get_plugin_name)();
    const char *(*get_plugin_version)();
    nixl_b_params_t (*get_backend_options)();
    nixl_mem_list_t (*get_backend_mems)();
};

static_assert(sizeof(nixlBasicDesc) == 24 && sizeof(nixlBlobDesc) == 56);
static_assert(sizeof(nixlMetaDesc) == 32 && sizeof(nixl_meta_dlist_t) == 40);
static_assert(sizeof(nixlBackendMD) == 16 && sizeof(nixlBackendReqH) == 8);
static_assert(sizeof(nixl_opt_b_args_t) == 72 && sizeof(nixlBackendInitParams) == 96);
static_assert(sizeof(nixlBackendEngine) == 208 && sizeof(nixlBackendPlugin) == 56);
