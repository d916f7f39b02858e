//! Catches a tier that counts as room though it is slow, one tenant that takes all places, and a refused
//! session that stays senior for ever.

use super::*;

#[test]
fn quick_tiers_keep_contexts_as_a_pool_does() {
    let tier = |blocks, fetch_ms_per_token| SlowTier {
        blocks,
        fetch_ms_per_token,
    };
    for (pool, tiers, expected) in [
        (100, &[][..], 100),
        (100, &[tier(50, 0.5), tier(1000, 0.1)], 1150),
        // Hardly quicker than computing at a millisecond a token, or nobody knows.
        (100, &[tier(50, 0.6), tier(1000, 0.1)], 1100),
        (100, &[tier(50, 0.0), tier(1000, f64::NAN)], 100),
        // A pool that is not known stays so.
        (0, &[tier(50, 0.1)], 0),
        (100, &[tier(u64::MAX, 0.1)], u64::MAX),
    ] {
        assert_eq!(capacity_blocks(pool, tiers, 1.0), expected, "{tiers:?}");
    }
    let pools = [node(1, u64::MAX, 0.0), node(2, u64::MAX, 0.0)];
    assert_eq!(Room { nodes: &pools }.capacity_blocks(), Some(u64::MAX));
}

#[test]
fn one_tenant_leaves_places_to_wait_for_others() {
    let mut gate = Gate::new(Params {
        waiting_max: 10,
        ..Params::default()
    });
    let of = |id: u64, tenant: u64| Turn {
        tenant,
        ..turn(id, id.into(), 1.0, 0..1)
    };
    let is_refused = |verdict| matches!(verdict, Verdict::Refuse { .. });
    for id in 0..5 {
        assert_eq!(gate.arrive(0.0, ANY, of(id, 1), full), Verdict::Hold);
    }
    assert!(is_refused(gate.arrive(0.0, ANY, of(5, 1), full)));
    for id in 10..15 {
        assert_eq!(gate.arrive(0.0, ANY, of(id, 2), full), Verdict::Hold);
    }
    assert!(
        is_refused(gate.arrive(0.0, ANY, of(20, 3), full)),
        "all are taken"
    );
    // What goes gives its place back, in whatever way.
    gate.leave(1.0, 0);
    assert_eq!(gate.arrive(1.0, ANY, of(6, 1), full), Verdict::Hold);
    let gone = gate.release(2.0, ANY, |id, _| {
        if id == 1 {
            Start::Sent(NODE)
        } else {
            full(&Place::Anywhere)
        }
    });
    assert_eq!(
        gone.len(),
        0,
        "one node is full for all until it tells more"
    );
    let all = gate.release(40_000.0, ANY, |_, _| Start::Full(NODE));
    assert_eq!(all.len(), 10);
    assert_eq!(gate.arrive(40_000.0, ANY, of(30, 1), full), Verdict::Hold);
}

#[test]
fn a_place_in_the_order_is_kept_for_a_minute_only() {
    for (later_ms, first) in [(80_000.0, 1), (200_000.0, 2)] {
        let mut gate = Gate::new(Params {
            ageing: 1.0,
            ..Params::default()
        });
        gate.arrive(0.0, ANY, turn(1, 1, 5000.0, 0..1), full);
        assert_eq!(gate.release(30_000.0, ANY, |_, place| full(place)).len(), 1);
        // It comes again, beside a shorter one.
        gate.arrive(later_ms, ANY, turn(1, 1, 5000.0, 0..1), full);
        gate.arrive(later_ms, ANY, turn(2, 2, 1000.0, 0..1), full);
        let mut asked = Vec::new();
        gate.release(later_ms + 1000.0, ANY, |id, _| {
            asked.push(id);
            Start::Nowhere
        });
        assert_eq!(asked.first(), Some(&first), "{later_ms} ms later");
    }
}
