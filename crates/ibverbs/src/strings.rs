//! Names of values, and rates.

use std::ffi::{CStr, c_int};

/// Names of `ibv_wc_status`, in order.
const STATUSES: [&CStr; 24] = [
    c"success",
    c"local length error",
    c"local QP operation error",
    c"local EE context operation error",
    c"local protection error",
    c"work request flushed",
    c"memory window bind error",
    c"bad response",
    c"local access error",
    c"remote invalid request",
    c"remote access error",
    c"remote operation error",
    c"transport retry count exceeded",
    c"RNR retry count exceeded",
    c"local RDD violation",
    c"remote invalid RD request",
    c"remote abort",
    c"invalid EE context number",
    c"invalid EE context state",
    c"fatal error",
    c"response timeout",
    c"general error",
    c"tag matching error",
    c"tag matching rendezvous incomplete",
];

/// Names of `ibv_event_type`, in order.
const EVENTS: [&CStr; 20] = [
    c"CQ error",
    c"QP fatal error",
    c"QP request error",
    c"QP access error",
    c"communication established",
    c"send queue drained",
    c"path migrated",
    c"path migration failed",
    c"device fatal error",
    c"port active",
    c"port error",
    c"LID changed",
    c"PKey table changed",
    c"subnet manager changed",
    c"SRQ error",
    c"SRQ limit reached",
    c"last WQE reached",
    c"client reregistration",
    c"GID table changed",
    c"WQ fatal error",
];

/// Names of `ibv_port_state`, in order.
const PORT_STATES: [&CStr; 6] = [c"no state", c"down", c"init", c"armed", c"active", c"deferred"];

/// Names of `ibv_node_type`, from 1 on.
const NODE_TYPES: [&CStr; 6] =
    [c"channel adapter", c"switch", c"router", c"RNIC", c"usNIC", c"usNIC UDP"];

fn find(names: &[&'static CStr], number: c_int) -> &'static CStr {
    usize::try_from(number).ok().and_then(|number| names.get(number)).copied().unwrap_or(c"unknown")
}

pub(crate) fn status(number: c_int) -> &'static CStr {
    find(&STATUSES, number)
}

pub(crate) fn event(number: c_int) -> &'static CStr {
    find(&EVENTS, number)
}

pub(crate) fn port_state(number: c_int) -> &'static CStr {
    find(&PORT_STATES, number)
}

pub(crate) fn node_type(number: c_int) -> &'static CStr {
    find(&NODE_TYPES, number.saturating_sub(1))
}

/// `ibv_rate` and its Mb/s.
const RATES: [(c_int, c_int); 23] = [
    (2, 2_500),
    (5, 5_000),
    (3, 10_000),
    (6, 20_000),
    (4, 30_000),
    (7, 40_000),
    (8, 60_000),
    (9, 80_000),
    (10, 120_000),
    (11, 14_062),
    (12, 56_250),
    (13, 112_500),
    (14, 168_750),
    (15, 25_781),
    (16, 103_125),
    (17, 206_250),
    (18, 309_375),
    (19, 28_125),
    (20, 53_125),
    (21, 425_000),
    (22, 637_500),
    (23, 850_000),
    (24, 1_275_000),
];

pub(crate) fn rate_to_mbps(rate: c_int) -> c_int {
    RATES.iter().find(|(known, _)| *known == rate).map_or(-1, |(_, mbps)| *mbps)
}

/// The rate, or 0, the maximum, for a number that has none.
pub(crate) fn mbps_to_rate(mbps: c_int) -> c_int {
    RATES.iter().find(|(_, known)| *known == mbps).map_or(0, |(rate, _)| *rate)
}

/// Multiples of 2.5 Gb/s, of the rates that are such.
pub(crate) fn rate_to_mult(rate: c_int) -> c_int {
    let mbps = rate_to_mbps(rate);
    if mbps > 0 && mbps % 2_500 == 0 { mbps / 2_500 } else { -1 }
}

pub(crate) fn mult_to_rate(mult: c_int) -> c_int {
    mult.checked_mul(2_500).map_or(0, mbps_to_rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_beyond_the_tables_are_unknown() {
        assert_eq!((status(12), status(0)), (c"transport retry count exceeded", c"success"));
        assert_eq!((event(16), node_type(1)), (c"last WQE reached", c"channel adapter"));
        for number in [-1, 99, c_int::MAX, c_int::MIN] {
            assert_eq!(status(number), c"unknown");
            assert_eq!(event(number), c"unknown");
            assert_eq!(port_state(number), c"unknown");
            assert_eq!(node_type(number), c"unknown");
        }
    }

    #[test]
    fn rates_and_their_inverse() {
        for (rate, mbps) in RATES {
            assert_eq!((rate_to_mbps(rate), mbps_to_rate(mbps)), (mbps, rate));
        }
        assert_eq!((rate_to_mult(7), mult_to_rate(16)), (16, 7));
        assert_eq!((rate_to_mbps(0), mbps_to_rate(1), rate_to_mult(15)), (-1, 0, -1));
        assert_eq!(mult_to_rate(c_int::MAX), 0);
    }
}
