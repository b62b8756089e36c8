//! The smallest protocol keeps its promises, and each fault breaks one.

use tower_fixed_window_model::{Fault, Protocol, SMALL, look};

#[test]
fn the_protocol_keeps_its_promises() {
    for protocol in [
        SMALL,
        Protocol { refunds: false, failover: true, ..SMALL },
        Protocol { refunds: false, local: true, ..SMALL },
    ] {
        let looked = look(&protocol);
        assert!(looked.broken.is_empty(), "{protocol:?}: {:?}", looked.broken);
        assert!(looked.never.is_empty(), "{protocol:?}: {:?}", looked.never);
    }
}

#[test]
fn without_a_safety_its_promise_is_broken() {
    for fault in Fault::ALL {
        let looked = look(&fault.protocol());
        let broken = looked.broken.iter().any(|(what, _)| *what == fault.breaks());
        assert!(broken, "{fault:?}: {:?}", looked.broken);
    }
}
