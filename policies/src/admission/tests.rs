//! Catches a tenant past its limits, a newcomer that overtakes the queue, and a `Retry-After` that
//! no client can use.

use super::{Admission, AdmissionLimits, TenantLoad, admit};

fn check(running: u32, queued: u32, mean_duration_ms: u64, expected: Admission) {
    let limits = AdmissionLimits {
        running_max: 4,
        queued_max: 8,
    };
    let load = TenantLoad {
        running,
        queued,
        mean_duration_ms,
    };
    assert_eq!(admit(&load, &limits), expected, "{load:?}");
}

fn refuse(retry_after_s: u64) -> Admission {
    Admission::Refuse { retry_after_s }
}

#[test]
fn run_queue_refuse() {
    check(0, 0, 0, Admission::Run);
    check(3, 0, 0, Admission::Run);
    check(4, 0, 0, Admission::Queue { ahead: 0 });
    check(4, 7, 0, Admission::Queue { ahead: 7 });
    // A free permit with a queue behind it is the queue's.
    check(3, 1, 0, Admission::Queue { ahead: 1 });
    // Three rounds of 4 requests until a place is free; at least one second, at most 60.
    check(4, 8, 2000, refuse(6));
    check(4, 8, 10, refuse(1));
    check(4, 8, 0, refuse(1));
    check(4, 8, u64::MAX, refuse(60));
    check(u32::MAX, u32::MAX, 1, refuse(60));
}

#[test]
fn limits_of_nothing_refuse_everything() {
    let limits = AdmissionLimits {
        running_max: 0,
        queued_max: 0,
    };
    assert_eq!(admit(&TenantLoad::default(), &limits), refuse(1));
}
