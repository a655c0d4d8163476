//! Registration of guests' memory.

use super::odd::{Odd, PIECE};
use crate::Dma;
use crate::memory::{Ended, Registrar, Turns, Wanted};
use aryk_bdev::{Env, MemoryClient, RegisterError};
use aryk_bdev_conformance::block_on;
use aryk_dma::{DmaRange, Mapping, Region};
use aryk_nvme_model::{Config, Model};
use aryk_pci::{PendingMap, PendingUnmap};
use std::sync::Arc;
use tokio::sync::oneshot;

fn range(pieces: u64) -> (Arc<Mapping>, DmaRange) {
    let mapping = Arc::new(Mapping::anonymous(pieces * PIECE).unwrap());
    let range = mapping.dma_range(0, pieces * PIECE).unwrap();
    (mapping, range)
}

#[test]
fn guests_take_turns_in_registering_their_memory() {
    let function = Odd::slow(&Model::new("model", Config::default()).unwrap());
    let memory: Vec<_> = [3, 2, 1, 1].into_iter().map(range).collect();
    let mut turns = Turns::new();
    let mut replies = Vec::new();
    // One guest with much memory in two regions, and two guests with little that come after it.
    for (owner, (_, range)) in ["much", "much", "little", "less"].into_iter().zip(&memory) {
        let (reply, answer) = oneshot::channel();
        turns.add(Wanted { owner: owner.into(), map: PendingMap::new(range.clone()), reply });
        replies.push(answer);
    }
    let mut steps = 0;
    while !turns.is_empty() {
        turns.step(&function);
        steps += 1;
        if steps == 3 {
            assert!(replies[0].try_recv().is_err() && replies[1].try_recv().is_err());
            for reply in &mut replies[2..] {
                assert!(reply.try_recv().unwrap().is_ok(), "after a piece of each guest before it");
            }
        }
    }
    let of = |addr: &u64| memory.iter().position(|(_, range)| range.addr() == *addr).unwrap();
    let order: Vec<_> = function.pieces.lock().unwrap().iter().map(of).collect();
    assert_eq!(order, [0, 2, 3, 0, 0, 1, 1]);
    assert!(replies[0].try_recv().unwrap().is_ok() && replies[1].try_recv().unwrap().is_ok());
}

#[test]
fn guests_take_turns_in_unregistering_their_memory() {
    let model = Model::new("model", Config::default()).unwrap();
    let function = Odd::slow(&model);
    let memory: Vec<_> = [3, 2, 1].into_iter().map(range).collect();
    let mut turns = Turns::new();
    let (mut replies, mut iovas) = (Vec::new(), Vec::new());
    for (owner, (_, range)) in ["much", "much", "little"].into_iter().zip(&memory) {
        let iova = aryk_pci::Function::map(&*model, range).unwrap();
        let (reply, answer) = oneshot::channel();
        turns.add(Ended { owner: owner.into(), unmap: PendingUnmap::new(iova, range.len()), reply });
        replies.push(answer);
        iovas.push(iova);
    }
    while !turns.is_empty() {
        turns.step(&function);
    }
    let of = |iova: &u64| iovas.iter().position(|known| known == iova).unwrap();
    let order: Vec<_> = function.pieces.lock().unwrap().iter().map(of).collect();
    assert_eq!(order, [0, 2, 0, 0, 1, 1], "little waits for one piece of much");
    replies.iter_mut().for_each(|reply| reply.try_recv().unwrap());
    for (iova, (_, range)) in iovas.into_iter().zip(&memory) {
        assert!(aryk_pci::Function::unmap(&*model, iova, range.len()).is_err(), "it is unmapped");
    }
}

#[test]
fn memory_is_mapped_until_it_is_unregistered() {
    let model = Model::new("model", Config::default()).unwrap();
    let function = Arc::new(Odd::slow(&model));
    let registrar = Registrar::start(Arc::<Odd>::clone(&function), Dma::Pin).unwrap();
    let (_mapping, memory) = range(3);
    let iova = block_on(registrar.register(memory.clone(), "vm".into())).unwrap();
    assert_eq!(function.pieces.lock().unwrap().len(), 3);
    block_on(registrar.unregister(memory.clone(), "vm".into(), iova));
    assert!(aryk_pci::Function::unmap(&*function, iova, memory.len()).is_err(), "it is unmapped");
}

#[test]
fn memory_without_huge_pages_is_left_out_and_that_is_no_failure() {
    let model = Model::new("model", Config::default()).unwrap();
    let function = Arc::new(Odd::slow(&model));
    let (mapping, memory) = range(1);
    let registrar = Registrar::start(Arc::<Odd>::clone(&function), Dma::Auto).unwrap();
    block_on(async {
        let declined = registrar.register(memory, "vm".into()).await.unwrap_err();
        assert!(matches!(declined, RegisterError::Declined(_)), "{declined:?}");
        let env = Env::default();
        let attachment = env.memory().attach(registrar).await.unwrap();
        // The memory leaves with its mapping.
        let regions = [Region { guest_addr: 0, user_addr: 0, len: PIECE, offset: 0, mapping }];
        env.memory().add(&regions, "vm").await;
        // The reply to a front-end does not wait for ever.
        while env.memory().without_value(9).iter().all(|without| without.reason.is_none()) {
            tokio::task::yield_now().await;
        }
        let client = env.memory().clients().remove(0);
        assert_eq!((client.declined, client.failed, client.registered), (1, 0, 0));
        let without = env.memory().without_value(9).remove(0);
        assert_eq!(without.reason.unwrap(), "the memory has no huge pages, and `dma` is `auto`");
        assert!(function.pieces.lock().unwrap().is_empty());
        drop(regions);
        attachment.detach().await;
    });
}
