//! Does an answer depend on which node computed its prefix, when it came through the shared store?

use engine::kv::store::form::Form;
use engine::kv::store::shared::mooncake::{Mooncake, MooncakeConfig};
use engine::kv::store::shared::{Seal, SharedTier};
use engine::kv::store::{Blocks, Tier};
use engine::model::OpsKind;
use engine::parallel::RankGroup;

use super::file_of;
use super::mooncake_twin::Twin;
use super::tiers::{Node, group, play};
use super::tiny::Tiny;

/// How often a node is tried whose reads may always come too late on a busy machine.
const TRIES: usize = 20;

/// Would catch a body that is cut or shifted on its way, and blocks that are put out of order.
#[test]
fn a_way_through_the_store_to_another_node_changes_no_bit() {
    let Some(twin) = Twin::new() else { return };
    let file = file_of(&Tiny::new(7).to_bytes());
    for (ops, form) in [
        (OpsKind::Cpu, Form::Exact),
        (OpsKind::Cpu, Form::Int8),
        (OpsKind::CpuInt8, Form::Exact),
    ] {
        let group = |blocks| group(file.path(), ops, 1, blocks);
        let whole = Node::sharing(group(400), (400, 0), None, None);
        let (expected, _) = play(&whole);
        whole.end();
        let (answers, damaged) = through_the_store(&twin, form, &|| group(14));
        assert!(form == Form::Int8 || answers == expected, "{ops:?}");
        assert_eq!(damaged, 0, "{ops:?} {form:?}");
    }
    let objects = std::fs::read_dir(twin.path().join("objects")).expect("a folder");
    assert!(objects.count() > 20, "and much was put");
}

/// What a node answers some of whose blocks came from the store, and how many it took for damaged.
fn through_the_store(
    twin: &Twin,
    form: Form,
    group: &dyn Fn() -> RankGroup,
) -> (Vec<Vec<(u32, u32)>>, u64) {
    for _ in 0..TRIES {
        let ranks = group().keeping(form);
        let layout = ranks.first().block_layout();
        let kept = (form, ranks.kept_bytes());
        let seal = Seal::new([1; 32], &layout, kept, form.mark([0; 32]));
        let shared = SharedTier::start(seal, |bytes, ends| {
            let config = MooncakeConfig {
                master: "127.0.0.1:50051".to_owned(),
                host: None,
                python: twin.python(),
                segment_bytes: 0,
                device: None,
            };
            Ok(Box::new(Mooncake::new(config, bytes, ends)?))
        });
        let shared = shared.expect("a thread");
        while !shared.is_up() {
            std::thread::yield_now();
        }
        let node = Node::sharing(ranks, (14, 14), None, Some(shared));
        let (answers, _) = play(&node);
        let tiers = &node.metrics.tiers;
        let (brought, damaged) = (
            tiers.hit_tokens(Tier::Shared).get(),
            tiers.shared.damaged.get(),
        );
        node.end();
        if brought > 0 || damaged > 0 {
            return (answers, damaged);
        }
    }
    unreachable!("nothing ever came from the store");
}
