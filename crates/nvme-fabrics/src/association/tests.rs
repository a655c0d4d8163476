//! Tests of associations.

use std::collections::BTreeMap;
use std::sync::Arc;

use aryk_nvme::spec::register::{CC, Cc};

use super::*;
use crate::command::Command;
use crate::property::Access;
use crate::subsystem::{Commands, Io, Service, View};

const LISTENER: u32 = 7;

fn connect(qid: u16, sqsize: u16) -> Connect {
    Connect { record_format: 0, qid, sqsize, disables_flow_control: false, keep_alive_ms: 0 }
}

fn data(host: u8, controller_id: u16) -> ConnectData {
    ConnectData {
        host_id: [host; 16],
        controller_id,
        subsystem: "nqn.2016-06.io.spdk:cnode1".parse().unwrap(),
        host: format!("nqn.2016-06.io.spdk:host{host}").parse().unwrap(),
        incarnation: None,
    }
}

/// A controller with two I/O queues of up to 16 entries.
fn controller(association: Association) -> Controller {
    let io = Io {
        nsid_max: 1,
        namespaces: BTreeMap::new(),
        ana: None,
        transfer_max: 4096,
        in_capsule_max: 4096,
        queues: 2,
        commands: Commands::default(),
        retry_delays: [0; 3],
    };
    let view = View {
        nqn: "nqn.2016-06.io.spdk:cnode1".parse().unwrap(),
        serial: String::new(),
        model: String::new(),
        firmware: String::new(),
        sgls: crate::sgl::DataBlocks::Transport,
        service: Service::Io(io),
    };
    Controller::new(association, Arc::new(view), 16, 0, 0).unwrap()
}

fn enable(controller: &mut Controller) {
    let value = Cc::enabled(4096, false).0.into();
    let entry = Command::PropertySet { access: Access::four(CC), value }.encode();
    controller.execute(&entry, 0, 0, &mut Vec::new());
    assert!(controller.properties().is_ready());
}

/// A host that connects an admin queue and is admitted.
fn admit(associations: &mut Associations, host: u8) -> Association {
    match associations.connect_admin(&connect(0, 31), &data(host, ANY_CONTROLLER), 32, LISTENER) {
        Ok(Admission::Admitted(association)) => association,
        other => panic!("{other:?}"),
    }
}

#[test]
fn identifiers_are_used_in_turn_and_when_they_are_free() {
    let mut associations = Associations::new(5..=7, Duplicates::Allow);
    let ids = |associations: &mut Associations| admit(associations, 1).controller_id;
    assert_eq!((ids(&mut associations), ids(&mut associations)), (5, 6));
    associations.ended(5);
    assert_eq!((ids(&mut associations), ids(&mut associations)), (7, 5));
    let full = associations.connect_admin(&connect(0, 31), &data(1, ANY_CONTROLLER), 32, LISTENER);
    assert_eq!(full, Err(Refusal::Code(status::CONTROLLER_BUSY)));
    associations.ended(6);
    assert_eq!(ids(&mut associations), 6);
    let all: Vec<u16> = associations.all().map(|association| association.controller_id).collect();
    assert_eq!(all, [5, 6, 7]);
}

#[test]
fn admin_queues_are_checked() {
    let mut associations = Associations::new(1..=9, Duplicates::Allow);
    let mut refusal = |connect, data: ConnectData| {
        associations.connect_admin(&connect, &data, 32, LISTENER).expect_err("a refusal")
    };
    let any = || data(1, ANY_CONTROLLER);
    let format = Connect { record_format: 1, ..connect(0, 31) };
    assert_eq!(refusal(format, any()), Refusal::Code(status::INCOMPATIBLE_FORMAT));
    for sqsize in [0, 32, u16::MAX] {
        assert_eq!(refusal(connect(0, sqsize), any()), Refusal::Parameter(InvalidParameter::SQSIZE));
    }
    for id in [0, 1, 0xfffe] {
        assert_eq!(refusal(connect(0, 31), data(1, id)), Refusal::Parameter(InvalidParameter::CNTLID));
    }
    assert_eq!(associations.all().count(), 0);
}

#[test]
fn io_queues_are_those_of_the_hosts_controller() {
    let mut associations = Associations::new(1..=9, Duplicates::Allow);
    let mut controller = controller(admit(&mut associations, 1));
    let mut attempt = |controller: &Controller, connect: Connect, data: ConnectData, listener| {
        associations.connect_io(&connect, &data, listener, |id| (id == 1).then_some(controller))
    };
    let code = |code| Err(Refusal::Code(code));
    let wrong = |parameter| Err(Refusal::Parameter(parameter));
    let not_enabled = attempt(&controller, connect(1, 15), data(1, 1), LISTENER);
    assert_eq!(not_enabled, code(Code::COMMAND_SEQUENCE_ERROR));
    enable(&mut controller);
    let mut attempt = |connect, data, listener| attempt(&controller, connect, data, listener);
    assert_eq!(attempt(connect(1, 15), data(1, 1), LISTENER), Ok(()));
    assert_eq!(attempt(connect(1, 15), data(1, 1), LISTENER), code(Code::COMMAND_SEQUENCE_ERROR), "twice");
    assert_eq!(attempt(connect(2, 16), data(1, 1), LISTENER), wrong(InvalidParameter::SQSIZE));
    assert_eq!(attempt(connect(3, 15), data(1, 1), LISTENER), wrong(InvalidParameter::QID));
    assert_eq!(attempt(connect(0, 15), data(1, 1), LISTENER), wrong(InvalidParameter::QID));
    assert_eq!(attempt(connect(2, 15), data(1, 2), LISTENER), wrong(InvalidParameter::CNTLID));
    assert_eq!(attempt(connect(2, 15), data(1, 1), LISTENER + 1), wrong(InvalidParameter::CNTLID));
    assert_eq!(attempt(connect(2, 15), data(2, 1), LISTENER), wrong(InvalidParameter::HOSTNQN));
    let other_id = ConnectData { host_id: [9; 16], ..data(1, 1) };
    assert_eq!(attempt(connect(2, 15), other_id, LISTENER), wrong(InvalidParameter::HOST_ID));
    assert_eq!(attempt(connect(2, 1), data(1, 1), LISTENER), Ok(()));
    assert!(associations.queues(1).eq([1, 2]));
    associations.disconnected(1, 1);
    let again = associations.connect_io(&connect(1, 15), &data(1, 1), LISTENER, |_| Some(&controller));
    assert_eq!(again, Ok(()), "a queue that has ended is connected again");
}

#[test]
fn a_host_gets_its_next_controller_after_the_earlier_ones_have_ended() {
    let mut associations = Associations::new(1..=9, Duplicates::Replace);
    let mut first = controller(admit(&mut associations, 1));
    enable(&mut first);
    assert_eq!(associations.connect_io(&connect(1, 15), &data(1, 1), LISTENER, |_| Some(&first)), Ok(()));
    admit(&mut associations, 2);
    let again = |associations: &mut Associations, listener| {
        associations.connect_admin(&connect(0, 31), &data(1, ANY_CONTROLLER), 32, listener)
    };
    assert_eq!(again(&mut associations, LISTENER), Ok(Admission::After(vec![1])));
    let late = associations.connect_io(&connect(2, 15), &data(1, 1), LISTENER, |_| Some(&first));
    assert_eq!(late, Err(Refusal::Code(status::CONTROLLER_BUSY)), "no queue joins a controller that ends");
    associations.disconnected(1, 1);
    assert_eq!(again(&mut associations, LISTENER), Ok(Admission::After(vec![1])), "it has not ended yet");
    assert!(matches!(again(&mut associations, LISTENER + 1), Ok(Admission::Admitted(_))), "another path");
    associations.ended(1);
    assert!(matches!(again(&mut associations, LISTENER), Ok(Admission::Admitted(a)) if a.controller_id == 4));
}

#[test]
fn a_life_of_a_host_replaces_its_other_lives_through_all_listeners() {
    let mut associations = Associations::new(1..=9, Duplicates::Replace);
    let mut connect_as = |life: Option<u8>, listener, ended: &[u16]| {
        ended.iter().for_each(|id| associations.ended(*id));
        let data = ConnectData { incarnation: life.map(|life| [life; 16]), ..data(1, ANY_CONTROLLER) };
        associations.connect_admin(&connect(0, 31), &data, 32, listener).unwrap()
    };
    let id = |admission| match admission {
        Admission::Admitted(association) => association.controller_id,
        Admission::After(earlier) => panic!("after {earlier:?}"),
    };
    assert_eq!(id(connect_as(Some(1), 1, &[])), 1);
    assert_eq!(id(connect_as(Some(1), 2, &[])), 2, "a second path");
    assert_eq!(id(connect_as(None, 3, &[])), 3, "a host that tells nothing may be the same one");
    assert_eq!(connect_as(Some(2), 4, &[]), Admission::After(vec![1, 2, 3]));
    assert_eq!(connect_as(Some(2), 4, &[1]), Admission::After(vec![2, 3]));
    assert_eq!(id(connect_as(Some(2), 4, &[2, 3])), 4);
    assert_eq!(connect_as(Some(2), 4, &[]), Admission::After(vec![4]), "the path was lost");
    assert_eq!(id(connect_as(Some(2), 4, &[4])), 5);
    assert_eq!(id(connect_as(Some(2), 1, &[])), 6, "a second path");
}

#[test]
fn the_lives_of_other_hosts_go_on() {
    let mut associations = Associations::new(1..=9, Duplicates::Replace);
    admit(&mut associations, 1);
    for (host, id) in [(2, 2), (3, 3)] {
        let data = ConnectData { incarnation: Some([host; 16]), ..data(host, ANY_CONTROLLER) };
        let admission = associations.connect_admin(&connect(0, 31), &data, 32, LISTENER).unwrap();
        assert!(matches!(admission, Admission::Admitted(of) if of.controller_id == id));
    }
}

#[test]
#[should_panic(expected = "a controller ends after its queues")]
fn a_controller_does_not_end_before_its_queues() {
    let mut associations = Associations::new(1..=9, Duplicates::Allow);
    let mut controller = controller(admit(&mut associations, 1));
    enable(&mut controller);
    associations.connect_io(&connect(1, 15), &data(1, 1), LISTENER, |_| Some(&controller)).unwrap();
    associations.ended(1);
}

#[test]
fn a_host_that_must_authenticate_ends_nothing_before() {
    let mut associations = Associations::new(1..=3, Duplicates::Replace);
    let first = admit(&mut associations, 1);
    let id = associations.reserve(&connect(0, 31), &data(1, ANY_CONTROLLER), 32).unwrap();
    assert_eq!(id, 2);
    let mut controller = controller(first);
    enable(&mut controller);
    let io = associations.connect_io(&connect(1, 15), &data(1, 1), LISTENER, |_| Some(&controller));
    assert_eq!(io, Ok(()), "the first controller goes on");
    // No other controller gets the identifier.
    assert_eq!(admit(&mut associations, 2).controller_id, 3);
    let full = associations.reserve(&connect(0, 31), &data(4, ANY_CONTROLLER), 32);
    assert_eq!(full, Err(Refusal::Code(status::CONTROLLER_BUSY)));
    let connect_again = |associations: &mut Associations| {
        associations.connect_authenticated(id, &data(1, ANY_CONTROLLER), LISTENER)
    };
    assert_eq!(connect_again(&mut associations), Ok(Admission::After(vec![1])));
    associations.disconnected(1, 1);
    associations.ended(1);
    let Ok(Admission::Admitted(second)) = connect_again(&mut associations) else { panic!("it is admitted") };
    assert_eq!(second.controller_id, id);
    let id = associations.reserve(&connect(0, 31), &data(5, ANY_CONTROLLER), 32).unwrap();
    associations.release(id);
    let late = associations.connect_authenticated(id, &data(5, ANY_CONTROLLER), LISTENER);
    assert_eq!(late, Err(Refusal::Code(status::CONTROLLER_BUSY)));
    assert_eq!(admit(&mut associations, 5).controller_id, id);
}
