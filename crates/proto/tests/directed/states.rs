//! State transitions, checked against an independent table.

use warpwire_proto::Psn;
use warpwire_proto::qp::attr::QpAttrMask as Set;
use warpwire_proto::qp::{
    ModifyError, Mtu, PathAttributes, QpAttributes, RcQp, Service, State, TransportOptions, Uc, Ud,
};

use crate::directed::pair::{A, ConnParams};

use Service::{Rc, Uc as Unreliable, Ud as Dgram};
use State::{Err as Error, Init, Reset, Rtr, Rts, Sqd, Sqe};

const STATES: [State; 7] = [Reset, Init, Rtr, Rts, Sqd, Sqe, Error];

const ALL: [Set; 18] = [
    Set::CURRENT_STATE,
    Set::PARTITION_INDEX,
    Set::PORT,
    Set::ACCESS,
    Set::QKEY,
    Set::PATH,
    Set::MTU,
    Set::DESTINATION,
    Set::RECEIVE_PSN,
    Set::MAX_DEST_RD_ATOMIC,
    Set::MIN_RNR_TIMER,
    Set::SEND_PSN,
    Set::TIMEOUT,
    Set::RETRY_COUNT,
    Set::RNR_RETRY,
    Set::MAX_RD_ATOMIC,
    Set::NOTIFY_DRAINED,
    Set::SELECTIVE_REPEAT,
];

/// A row: service, from, to, required, optional.
type Row = (Service, State, State, &'static [Set], &'static [Set]);

const RC_RUNNING: &[Set] = &[Set::CURRENT_STATE, Set::ACCESS, Set::MIN_RNR_TIMER];
const UC_RUNNING: &[Set] = &[Set::CURRENT_STATE, Set::ACCESS];
const UD_RUNNING: &[Set] = &[Set::CURRENT_STATE, Set::QKEY];

/// The transitions of RC and UC queue pairs, without alternate paths, and of UD queue pairs.
const ROWS: &[Row] = &[
    (Rc, Reset, Init, &[Set::PARTITION_INDEX, Set::PORT, Set::ACCESS], &[]),
    (Rc, Init, Init, &[], &[Set::PARTITION_INDEX, Set::PORT, Set::ACCESS]),
    (
        Rc,
        Init,
        Rtr,
        &[
            Set::PATH,
            Set::MTU,
            Set::DESTINATION,
            Set::RECEIVE_PSN,
            Set::MAX_DEST_RD_ATOMIC,
            Set::MIN_RNR_TIMER,
        ],
        &[Set::ACCESS, Set::PARTITION_INDEX, Set::SELECTIVE_REPEAT],
    ),
    (
        Rc,
        Rtr,
        Rts,
        &[Set::SEND_PSN, Set::TIMEOUT, Set::RETRY_COUNT, Set::RNR_RETRY, Set::MAX_RD_ATOMIC],
        RC_RUNNING,
    ),
    (Rc, Rts, Rts, &[], RC_RUNNING),
    (Rc, Rts, Sqd, &[], &[Set::NOTIFY_DRAINED]),
    (
        Rc,
        Sqd,
        Sqd,
        &[],
        &[
            Set::PORT,
            Set::PATH,
            Set::TIMEOUT,
            Set::RETRY_COUNT,
            Set::RNR_RETRY,
            Set::MAX_RD_ATOMIC,
            Set::MAX_DEST_RD_ATOMIC,
            Set::ACCESS,
            Set::PARTITION_INDEX,
            Set::MIN_RNR_TIMER,
        ],
    ),
    (Rc, Sqd, Rts, &[], RC_RUNNING),
    (Unreliable, Reset, Init, &[Set::PARTITION_INDEX, Set::PORT, Set::ACCESS], &[]),
    (Unreliable, Init, Init, &[], &[Set::PARTITION_INDEX, Set::PORT, Set::ACCESS]),
    (
        Unreliable,
        Init,
        Rtr,
        &[Set::PATH, Set::MTU, Set::DESTINATION, Set::RECEIVE_PSN],
        &[Set::ACCESS, Set::PARTITION_INDEX],
    ),
    (Unreliable, Rtr, Rts, &[Set::SEND_PSN], UC_RUNNING),
    (Unreliable, Rts, Rts, &[], UC_RUNNING),
    (Unreliable, Rts, Sqd, &[], &[Set::NOTIFY_DRAINED]),
    (Unreliable, Sqd, Sqd, &[], &[Set::PATH, Set::ACCESS, Set::PARTITION_INDEX]),
    (Unreliable, Sqd, Rts, &[], UC_RUNNING),
    (Unreliable, Sqe, Rts, &[], UC_RUNNING),
    (Dgram, Reset, Init, &[Set::PARTITION_INDEX, Set::PORT, Set::QKEY], &[]),
    (Dgram, Init, Init, &[], &[Set::PARTITION_INDEX, Set::PORT, Set::QKEY]),
    (Dgram, Init, Rtr, &[], &[Set::PARTITION_INDEX, Set::QKEY]),
    (Dgram, Rtr, Rts, &[Set::SEND_PSN], UD_RUNNING),
    (Dgram, Rts, Rts, &[], UD_RUNNING),
    (Dgram, Rts, Sqd, &[], &[Set::NOTIFY_DRAINED]),
    (Dgram, Sqd, Sqd, &[], &[Set::PARTITION_INDEX, Set::QKEY]),
    (Dgram, Sqd, Rts, &[], UD_RUNNING),
    (Dgram, Sqe, Rts, &[], UD_RUNNING),
];

fn row(service: Service, from: State, to: State) -> Option<Row> {
    let listed = ROWS.iter().copied().find(|row| (row.0, row.1, row.2) == (service, from, to));
    let always = to == Reset || to == Error && from != Reset;
    listed.or(always.then_some((service, from, to, &[], &[])))
}

/// Sets the attribute to a valid value.
fn set(attr: &mut QpAttributes, attribute: Set, from: State) {
    let good = ConnParams::default();
    let (init, rtr, rts) = (good.init_attr(), good.rtr_attr(A), good.rts_attr(A));
    match attribute {
        Set::CURRENT_STATE => attr.current_state = Some(from),
        Set::PARTITION_INDEX => attr.partition_index = init.partition_index,
        Set::PORT => attr.port = init.port,
        Set::ACCESS => attr.access = init.access,
        Set::QKEY => attr.qkey = Some(7),
        Set::PATH => attr.path = rtr.path,
        Set::MTU => attr.mtu = rtr.mtu,
        Set::DESTINATION => attr.destination = rtr.destination,
        Set::RECEIVE_PSN => attr.receive_psn = rtr.receive_psn,
        Set::MAX_DEST_RD_ATOMIC => attr.max_dest_rd_atomic = rtr.max_dest_rd_atomic,
        Set::MIN_RNR_TIMER => attr.min_rnr_timer = rtr.min_rnr_timer,
        Set::SEND_PSN => attr.send_psn = rts.send_psn,
        Set::TIMEOUT => attr.timeout = rts.timeout,
        Set::RETRY_COUNT => attr.retry_count = rts.retry_count,
        Set::RNR_RETRY => attr.rnr_retry = rts.rnr_retry,
        Set::MAX_RD_ATOMIC => attr.max_rd_atomic = rts.max_rd_atomic,
        Set::NOTIFY_DRAINED => attr.notify_drained = Some(true),
        Set::SELECTIVE_REPEAT => attr.selective_repeat = Some(true),
        other => panic!("{other:?}"),
    }
}

fn attr(from: State, to: State, attributes: &[Set]) -> QpAttributes {
    let mut attr = QpAttributes::new(to);
    attributes.iter().for_each(|attribute| set(&mut attr, *attribute, from));
    attr
}

/// A queue pair of any service.
enum Either {
    Rc(Box<RcQp>),
    Uc(Box<Uc>),
    Ud(Box<Ud>),
}

impl Either {
    fn modify(&mut self, attr: &QpAttributes) -> Result<(), ModifyError> {
        match self {
            Self::Rc(qp) => qp.modify(attr),
            Self::Uc(uc) => uc.modify(attr),
            Self::Ud(ud) => ud.modify(attr),
        }
    }

    fn state(&self) -> State {
        match self {
            Self::Rc(qp) => qp.state(),
            Self::Uc(uc) => uc.state(),
            Self::Ud(ud) => ud.state(),
        }
    }

    fn debug_text(&self) -> String {
        match self {
            Self::Rc(qp) => format!("{qp:?}"),
            Self::Uc(uc) => format!("{uc:?}"),
            Self::Ud(ud) => format!("{ud:?}"),
        }
    }

    /// A queue pair in `state`; `None` if this service has no such state.
    fn in_state(service: Service, state: State) -> Option<Self> {
        let mut qp = match service {
            Rc if state == Sqe => return None,
            Rc => Self::Rc(Box::new(RcQp::new(1, TransportOptions::default()))),
            Unreliable => Self::Uc(Box::new(Uc::new(1, 4))),
            Dgram => Self::Ud(Box::new(Ud::new(1, Mtu::new(256).unwrap(), 4))),
        };
        let via: &[State] = match state {
            Reset => &[],
            Init => &[Init],
            Rtr => &[Init, Rtr],
            Rts | Sqe => &[Init, Rtr, Rts],
            Sqd => &[Init, Rtr, Rts, Sqd],
            Error => &[Init, Error],
        };
        for to in via {
            let from = qp.state();
            let required = row(service, from, *to).unwrap().3;
            qp.modify(&attr(from, *to, required)).unwrap();
        }
        if let (Self::Ud(ud), Sqe) = (&mut qp, state) {
            crate::directed::datagram::fail_send_queue(ud);
        }
        if let (Self::Uc(uc), Sqe) = (&mut qp, state) {
            crate::directed::unreliable::fail_send_queue(uc);
        }
        assert_eq!(qp.state(), state);
        Some(qp)
    }

    #[track_caller]
    fn must_reject(&mut self, attr: &QpAttributes) -> ModifyError {
        let before = self.debug_text();
        let refused = self.modify(attr).expect_err("an invalid transition");
        assert_eq!(self.debug_text(), before, "a rejected transition changed something");
        refused
    }
}

fn every_pair(mut check: impl FnMut(Service, State, State, Either)) {
    for service in [Rc, Unreliable, Dgram] {
        for from in STATES {
            for to in STATES {
                if let Some(qp) = Either::in_state(service, from) {
                    check(service, from, to, qp);
                }
            }
        }
    }
}

#[test]
fn a_transition_is_in_the_table_or_rejected() {
    every_pair(|service, from, to, mut qp| match row(service, from, to) {
        Some((.., required, optional)) => {
            let all = [required, optional].concat();
            qp.modify(&attr(from, to, &all)).unwrap();
            assert_eq!(qp.state(), to);
        }
        None => {
            let refused = qp.must_reject(&QpAttributes::new(to));
            assert_eq!(refused, ModifyError::InvalidTransition { from, to });
            assert_eq!(refused.to_string(), format!("there is no transition from {from} to {to}"));
        }
    });
}

#[test]
fn a_connected_queue_pair_never_enters_or_leaves_sqe() {
    for state in STATES {
        let into = QpAttributes::new(Sqe).check(Rc, state);
        assert_eq!(into, Err(ModifyError::InvalidTransition { from: state, to: Sqe }));
    }
    for to in [Init, Rtr, Rts, Sqd] {
        assert!(QpAttributes::new(to).check(Rc, Sqe).is_err());
    }
}

#[test]
fn a_missing_attribute_is_rejected_and_named() {
    for &(service, from, to, required, _) in ROWS {
        for missing in required {
            let Some(mut qp) = Either::in_state(service, from) else { continue };
            let others: Vec<_> = required.iter().copied().filter(|one| one != missing).collect();
            let refused = qp.must_reject(&attr(from, to, &others));
            assert_eq!(refused, ModifyError::MissingAttr { from, to, missing: *missing });
            assert!(
                refused.to_string().ends_with(&format!("also requires {missing}")),
                "{refused}"
            );
        }
    }
}

#[test]
fn an_attribute_of_another_transition_is_rejected_and_named() {
    every_pair(|service, from, to, mut qp| {
        let Some((.., required, optional)) = row(service, from, to) else { return };
        let known = [required, optional].concat();
        for extra in ALL.into_iter().filter(|one| !known.contains(one)) {
            let refused = qp.must_reject(&attr(from, to, &[required, &[extra]].concat()));
            assert_eq!(refused, ModifyError::ExtraAttr { from, to, extra });
            assert!(
                refused.to_string().ends_with(&format!("does not accept {extra}")),
                "{refused}"
            );
        }
    });
}

#[test]
fn optional_attributes_may_come_alone() {
    for &(service, from, to, required, optional) in ROWS {
        for one in optional {
            let mut qp = Either::in_state(service, from).unwrap();
            qp.modify(&attr(from, to, &[required, &[*one]].concat())).unwrap();
        }
    }
}

#[test]
fn a_wrong_current_state_is_rejected() {
    for (service, from) in [(Rc, Rtr), (Rc, Rts), (Rc, Sqd), (Dgram, Rts), (Dgram, Sqe)] {
        let mut qp = Either::in_state(service, from).unwrap();
        let (.., required, _) = row(service, from, Rts).unwrap();
        let wrong = attr(from, Rts, required).with_current_state(Init);
        let refused = qp.must_reject(&wrong);
        assert_eq!(refused, ModifyError::WrongState { expected: Init, actual: from });
        assert_eq!(refused.to_string(), format!("the queue pair is in {from}, not in INIT"));
        qp.modify(&wrong.with_current_state(from)).unwrap();
    }
}

#[test]
fn an_invalid_value_is_rejected() {
    let good = ConnParams::default();
    let (init, rtr, rts) = (good.init_attr(), good.rtr_attr(A), good.rts_attr(A));
    let far = PathAttributes { flow_label: 1 << 20, ..rtr.path.unwrap() };
    let wrong = [
        (Reset, init.with_partition_index(1), Set::PARTITION_INDEX),
        (Reset, init.with_port(0), Set::PORT),
        (Reset, init.with_port(2), Set::PORT),
        (Init, rtr.with_destination(1 << 24), Set::DESTINATION),
        (Init, rtr.with_path(far), Set::PATH),
        (Init, rtr.with_max_dest_rd_atomic(129), Set::MAX_DEST_RD_ATOMIC),
        (Init, rtr.with_min_rnr_timer(32), Set::MIN_RNR_TIMER),
        (Rtr, rts.with_timeout(32), Set::TIMEOUT),
        (Rtr, rts.with_retry_count(8), Set::RETRY_COUNT),
        (Rtr, rts.with_rnr_retry(8), Set::RNR_RETRY),
        (Rtr, rts.with_max_rd_atomic(129), Set::MAX_RD_ATOMIC),
    ];
    for (from, attr, attribute) in wrong {
        let mut qp = Either::in_state(Rc, from).unwrap();
        let refused = qp.must_reject(&attr);
        assert!(
            matches!(refused, ModifyError::InvalidValue { attribute: of, .. } if of == attribute)
        );
        assert!(refused.to_string().starts_with(&format!("{attribute} must be ")), "{refused}");
    }
}

#[test]
fn psns_are_truncated_to_24_bits() {
    let mut qp = RcQp::new(1, TransportOptions::default());
    let params = ConnParams { psn: [0xab00_0001, 0xff12_3456], ..ConnParams::default() };
    params.bring_to_rts(&mut qp, A);
    assert_eq!(qp.next_psns(), (Psn::new(0x12_3456), Psn::new(1)));
}
