//! The smallest protocol keeps its promises, and each fault breaks one.

use tower_fixed_window_protocol::charges::{self, Protocol, SMALL};
use tower_fixed_window_protocol::groups::{self, AND_ALONE, Groups, IN_ONE_STEP, IN_ORDER};
use tower_fixed_window_protocol::tables::{self, TABLE, Tables};
use tower_fixed_window_protocol::{Looked, look};

#[track_caller]
fn assert_holds(model: impl std::fmt::Debug, looked: Looked) {
    assert!(looked.broken.is_empty(), "{model:?}: {:?}", looked.broken);
    assert!(looked.never.is_empty(), "{model:?}: {:?}", looked.never);
}

#[track_caller]
fn assert_breaks(fault: impl std::fmt::Debug, promise: &str, looked: Looked) {
    let broken = looked.broken.iter().any(|(what, _)| *what == promise);
    assert!(broken, "{fault:?}: {:?}", looked.broken);
}

#[test]
fn the_protocol_keeps_its_promises() {
    for protocol in [
        SMALL,
        Protocol { refunds: false, failover: true, ..SMALL },
        Protocol { refunds: false, local: true, ..SMALL },
        Protocol { local: true, ..SMALL },
    ] {
        assert_holds(&protocol, look(&protocol));
    }
}

#[test]
fn without_a_safety_its_promise_is_broken() {
    for fault in charges::Fault::ALL {
        assert_breaks(fault, fault.breaks(), look(&fault.protocol()));
    }
}

#[test]
fn charges_of_several_limits_keep_their_promises() {
    for groups in [
        IN_ORDER,
        IN_ONE_STEP,
        Groups { asked: AND_ALONE, ..IN_ORDER },
        Groups { asked: AND_ALONE, ..IN_ONE_STEP },
    ] {
        assert_holds(&groups, look(&groups));
    }
}

#[test]
fn without_a_safety_of_several_limits_their_promise_is_broken() {
    for fault in groups::Fault::ALL {
        assert_breaks(fault, fault.breaks(), look(&fault.model()));
    }
}

#[test]
fn nodes_over_a_table_keep_their_promises() {
    for table in [TABLE, Tables { adds: false, ..TABLE }] {
        assert_holds(&table, look(&table));
    }
}

#[test]
fn without_a_safety_of_tables_their_promise_is_broken() {
    for fault in tables::Fault::ALL {
        assert_breaks(fault, fault.breaks(), look(&fault.model()));
    }
}
