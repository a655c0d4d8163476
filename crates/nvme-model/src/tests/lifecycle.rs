//! Registers, enable, disable, shutdown, reset and removal.

use super::host::{Host, command, is_ok, status, with_prps};
use crate::{Config, Timing, Violation, admin};
use aryk_pci::{Function as _, Width};

fn slow() -> Config {
    let timing = Timing { enable: 5_000, disable: 7_000, shutdown: 9_000, ..Timing::IMMEDIATE };
    Config { timing, ..Config::default() }
}

#[test]
fn capabilities_are_those_of_the_configuration() {
    let config = Config { queue_entries: 256, dstrd: 2, to: 9, mpsmin: 0, mpsmax: 3, ..Config::default() };
    let host = Host::new(config);
    let cap = host.model.read_register(0, Width::Eight).unwrap();
    assert_eq!(cap & 0xffff, 255, "MQES");
    assert_eq!(cap >> 16 & 1, 1, "CQR");
    assert_eq!(cap >> 24 & 0xff, 9, "TO");
    assert_eq!(cap >> 32 & 0xf, 2, "DSTRD");
    assert_eq!(cap >> 37 & 1, 1, "the NVM command set");
    assert_eq!((cap >> 48 & 0xf, cap >> 52 & 0xf), (0, 3), "MPSMIN and MPSMAX");
    assert_eq!(u64::from(host.reg32(4)), cap >> 32, "the upper half alone");
    assert_eq!(host.reg32(8), 0x0002_0000, "VS");
    assert!(host.model.read_register(2, Width::Four).is_err());
    assert!(host.model.read_register(1 << 40, Width::Eight).is_err());
}

#[test]
fn ready_follows_enable_after_its_delays() {
    let mut host = Host::new(slow());
    host.enable();
    assert_eq!(host.now, 5_000);
    host.set32(0x14, 0);
    assert_eq!(host.reg32(0x1c) & 1, 1, "still ready");
    host.run_until(|host| host.reg32(0x1c) & 1 == 0);
    assert_eq!(host.now, 12_000);
    host.assert_clean();
}

#[test]
fn an_enable_during_a_disable_is_a_violation() {
    let host = Host::enabled(slow());
    host.set32(0x14, 0);
    host.set32(0x14, 6 << 16 | 4 << 20 | 1);
    host.model
        .with(|c| assert!(matches!(c.violations().first[..], [Violation::Register { offset: 0x14, .. }])));
}

#[test]
fn a_configuration_that_is_not_supported_is_fatal() {
    // AMS of weighted round robin; a command set that is not supported; a page above MPSMAX.
    for cc in [1 << 11, 1 << 4, 9 << 7] {
        let mut host = Host::new(Config::default());
        host.set32(0x24, 31 << 16 | 31);
        host.set64(0x28, host.iova);
        host.set64(0x30, host.iova + 4096);
        host.set32(0x14, cc | 1);
        host.step();
        assert_eq!(host.reg32(0x1c) & 3, 2, "CFS without RDY for CC {cc:#x}");
    }
}

#[test]
fn a_shutdown_flushes_and_reports_its_end() {
    let mut host = Host::ready(slow());
    assert!(is_ok(&host.write_block(3, 0x33, 0)));
    let cc = host.reg32(0x14);
    host.set32(0x14, cc | 1 << 14);
    assert_eq!(host.reg32(0x1c) >> 2 & 3, 1, "shutdown processing occurs");
    host.run_until(|host| host.reg32(0x1c) >> 2 & 3 == 2);
    host.model.with(|c| c.fail_power());
    assert!(host.model.with(|c| c.data(1, 3, 1).unwrap().iter().all(|&byte| byte == 0x33)));
}

#[test]
fn the_admin_queue_does_not_change_while_enabled() {
    let host = Host::enabled(Config::default());
    let before = host.reg32(0x24);
    host.set32(0x24, 0);
    assert_eq!(host.reg32(0x24), before);
    host.model.with(|c| assert_eq!(c.violations().count, 1));
    host.reg32(0x0c);
    host.model.with(|c| assert_eq!(c.violations().count, 2, "INTMS with MSI-X"));
}

#[test]
fn a_reset_forgets_queues_and_commands_in_flight() {
    let mut host = Host::ready(Config {
        timing: Timing { io: 1_000_000..=1_000_000, ..Timing::IMMEDIATE },
        ..Config::default()
    });
    let page = host.pages(1);
    host.submit(1, with_prps(super::host::io(crate::nvm::READ, 1, 0, 1), host.iova + page, 0));
    host.step();
    assert_eq!(host.model.with(|c| c.held_commands()), 1);
    host.disable();
    assert_eq!(host.model.with(|c| (c.held_commands(), c.io_queues())), (0, 0));
    host.now += 10_000_000;
    host.step();
    host.enable();
    host.create_queue(1, 8);
    host.assert_clean();
}

#[test]
fn a_removed_device_reads_all_ones_and_comes_back() {
    let mut host = Host::ready(Config::default());
    assert!(is_ok(&host.write_block(1, 0x11, 1 << 30)));
    host.model.with(|c| c.pull_out());
    assert_eq!(host.reg32(0x1c), u32::MAX);
    assert_eq!(host.model.read_register(0, Width::Eight).unwrap(), u64::MAX);
    let mut id = [0; 4];
    host.model.read_config(0, &mut id).unwrap();
    assert_eq!(id, [0xff; 4]);
    assert!(host.model.reset().is_err());
    host.ring(1);
    assert_eq!(host.step(), u64::MAX);
    host.model.with(|c| c.plug_in());
    host.enable();
    host.create_queue(1, 8);
    assert_eq!(host.read_block(1), 0x11);
}

#[test]
fn a_function_level_reset_disables_at_once() {
    let mut host = Host::enabled(slow());
    host.model.reset().unwrap();
    assert_eq!((host.reg32(0x14), host.reg32(0x1c)), (0, 0));
    assert_eq!(host.model.read_register(0x28, Width::Eight).unwrap(), 0);
    host.enable();
    host.assert_clean();
}

#[test]
fn a_fatal_controller_fetches_nothing_until_its_reset() {
    let mut host = Host::enabled(Config::default());
    host.model.with(|c| c.fail_fatally());
    assert_eq!(host.reg32(0x1c) & 2, 2);
    host.submit(0, command(admin::KEEP_ALIVE, 0, [0; 6]));
    host.step();
    assert!(host.reap(0).is_none());
    host.disable();
    assert_eq!(host.reg32(0x1c) & 2, 0);
    host.enable();
    assert!(is_ok(&host.admin(command(admin::KEEP_ALIVE, 0, [0; 6]))));
}

#[test]
fn memory_that_is_unmapped_or_not_allowed_is_not_accessed() {
    let mut host = Host::ready(Config::default());
    let done = host.run(with_prps(super::host::io(crate::nvm::READ, 1, 0, 1), 0x1000, 0));
    assert_eq!(status(&done), (0, 4), "Data Transfer Error");
    host.model
        .with(|c| assert!(matches!(c.violations().first[..], [Violation::Unmapped { iova: 0x1000, .. }])));
    host.model.set_bus_master(false).unwrap();
    host.submit(1, command(0, 1, [0; 6]));
    host.step();
    assert_eq!(host.reg32(0x1c) & 2, 2, "the queue cannot be fetched");
    host.model.with(|c| assert_eq!((c.violations().count, c.violations().blocked), (1, 1)));
}

#[test]
fn a_host_that_gives_up_a_start_need_not_wait_for_a_ready_bit_that_was_never_set() {
    let mut host =
        Host::new(Config { timing: Timing { disable: 1000, ..Timing::IMMEDIATE }, ..Config::default() });
    host.model.with(|c| c.faults().never_ready = true);
    let enabled = 6 << 16 | 4 << 20 | 1;
    for value in [enabled, 0, enabled, 0] {
        host.model.write_register(0x14, Width::Four, value).unwrap();
        host.step();
        assert_eq!(host.reg32(0x1c) & 1, 0);
    }
    host.assert_clean();
}
