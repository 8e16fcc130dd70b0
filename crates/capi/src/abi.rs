//! Structures of `warpwire.h`. A test compares them with the header.

use std::ffi::{c_char, c_int, c_void};

/// An opaque handle: a number, never a pointer.
pub type Handle = *mut c_void;

/// `ww_error`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // the header's
pub struct ErrorInfo {
    pub status: c_int,
    pub code: c_int,
    pub message: *const c_char,
    pub what: *const c_char,
    pub why: *const c_char,
    pub fix: *const c_char,
}

/// `ww_agent_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct AgentOptions {
    pub size: usize,
    pub link: *const c_char,
    pub address: *const c_char,
    pub engines: u32,
    pub queue_pairs: u32,
    pub send_depth: u32,
    pub connect_timeout_ms: u32,
    pub max_pending_notifications: u64,
}

/// `ww_transfer_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct TransferOptions {
    pub size: usize,
    pub notification: *const c_void,
    pub notification_len: usize,
    pub timeout_ms: u64,
}

/// `ww_range`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Range {
    pub address: u64,
    pub len: u64,
}

/// `ww_memory_info`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct MemoryInfo {
    pub address: u64,
    pub len: u64,
    pub kind: *const c_char,
    pub path: *const c_char,
    pub why: *const c_char,
}

/// `ww_peer_info`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct PeerInfo {
    pub name: *const c_char,
    pub is_connected: c_int,
    pub path: *const c_char,
}

/// `ww_remote_memory`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RemoteMemory {
    pub address: u64,
    pub len: u64,
    pub kind: *const c_char,
}

/// `ww_notification`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Notification {
    pub from: *const c_char,
    pub bytes: *const c_void,
    pub len: usize,
}

/// `ww_window_info`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct WindowInfo {
    pub pointer: *mut c_void,
    pub address: u64,
    pub len: u64,
    pub path: *const c_char,
    pub mapping: *const c_char,
    pub why: *const c_char,
}

/// `ww_context_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct ContextOptions {
    pub size: usize,
    pub link: *const c_char,
    pub address: *const c_char,
}

/// `ww_mr_info`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct MrInfo {
    pub address: u64,
    pub len: u64,
    pub lkey: u32,
    pub rkey: u32,
    pub path: *const c_char,
    pub why: *const c_char,
}

/// `ww_kernel_qp_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct KernelQpOptions {
    pub size: usize,
    pub send_depth: u32,
    pub receive_depth: u32,
    pub is_single_poster: c_int,
    pub is_direct_off: c_int,
    pub has_direct_atomics: c_int,
}

/// `ww_sock_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct SockOptions {
    pub size: usize,
    pub ring: u64,
    pub arena: u64,
    pub sockets: u32,
}

warpwire_cabi::layouts! { pub,
    "ww_error" ErrorInfo, 40, { status 0, code 4, message 8, what 16, why 24, fix 32 }
    "ww_agent_options" AgentOptions, 48, {
        size 0, link 8, address 16, engines 24, queue_pairs 28, send_depth 32,
        connect_timeout_ms 36, max_pending_notifications 40
    }
    "ww_transfer_options" TransferOptions, 32, {
        size 0, notification 8, notification_len 16, timeout_ms 24
    }
    "ww_range" Range, 16, { address 0, len 8 }
    "ww_memory_info" MemoryInfo, 40, { address 0, len 8, kind 16, path 24, why 32 }
    "ww_peer_info" PeerInfo, 24, { name 0, is_connected 8, path 16 }
    "ww_remote_memory" RemoteMemory, 24, { address 0, len 8, kind 16 }
    "ww_notification" Notification, 24, { from 0, bytes 8, len 16 }
    "ww_context_options" ContextOptions, 24, { size 0, link 8, address 16 }
    "ww_mr_info" MrInfo, 40, { address 0, len 8, lkey 16, rkey 20, path 24, why 32 }
    "ww_kernel_qp_options" KernelQpOptions, 32, {
        size 0, send_depth 8, receive_depth 12, is_single_poster 16, is_direct_off 20,
        has_direct_atomics 24
    }
    "ww_sock_options" SockOptions, 32, { size 0, ring 8, arena 16, sockets 24 }
    "ww_window_info" WindowInfo, 48, { pointer 0, address 8, len 16, path 24, mapping 32, why 40 }
}
