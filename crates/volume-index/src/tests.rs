//! The index against a model that keeps every version: random writes, snapshots, deletions, moved blocks, rewritten ranges,
//! flushes and merges in any order. Each view must see what the model says, and the units of each blob must be those of the runs'
//! entries.

mod memory;
mod model;
mod pages;
mod rig;

use proptest::prelude::*;
use rig::{Op, Rig};

fn op() -> impl Strategy<Value = Op> {
    let (timeline, range) = (0..3_u32, 0..4_u32);
    let any = any::<u64>();
    prop_oneof![
        6 => (timeline.clone(), range.clone(), 0..1024_u16, 1..300_u16, 0..8_u8).prop_map(|(timeline, range, first, count, kind)| {
            Op::Write { timeline, range, first, count: count.min(1024 - first), is_zero: kind == 0 }
        }),
        6 => (timeline.clone(), 1..400_u32, any).prop_map(|(timeline, writes, seed)| Op::Scatter { timeline, writes, seed }),
        2 => (timeline.clone(), range.clone(), 0..1024_u16, 1..120_u32)
            .prop_map(|(timeline, range, block, writes)| Op::Hot { timeline, range, block, writes }),
        2 => (timeline.clone(), range.clone()).prop_map(|(timeline, range)| Op::ZeroRange { timeline, range }),
        2 => (timeline.clone(), range).prop_map(|(timeline, range)| Op::Rewrite { timeline, range }),
        4 => timeline.clone().prop_map(|timeline| Op::Snapshot { timeline }),
        3 => (timeline.clone(), any).prop_map(|(timeline, seed)| Op::DeleteSnapshot { timeline, seed }),
        1 => timeline.clone().prop_map(|timeline| Op::DeleteLive { timeline }),
        1 => timeline.prop_map(|timeline| Op::Delete { timeline }),
        4 => (1..200_u32, any).prop_map(|(count, seed)| Op::Move { count, seed }),
        4 => Just(Op::Freeze),
        4 => (1..4_usize, 4..20_u32).prop_map(|(tables, pages)| Op::Flush { tables, pages }),
        4 => (any, 4..40_u32).prop_map(|(seed, pages)| Op::StartMerge { seed, pages }),
        8 => (1..3000_usize).prop_map(|entries| Op::StepMerge { entries }),
        3 => any.prop_map(|seed| Op::Look { seed }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, max_shrink_iters: 2000, ..ProptestConfig::default() })]
    #[test]
    fn every_view_sees_what_the_model_keeps(ops in prop::collection::vec(op(), 1..120)) {
        let mut rig = Rig::new();
        for op in &ops {
            rig.apply(op);
        }
        rig.finish();
    }
}
