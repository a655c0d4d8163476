//! Tests: parsing of files, differences, and the order of steps.

use super::*;
use proptest::prelude::*;

fn parse(text: &str) -> Result<Vec<Call>, String> {
    document::parse(text, Path::new("/d"))
}

fn made(call: &Call, bytes: Option<u64>) -> Existing {
    let (kind, name) = (call.kind(), call.name().unwrap());
    Existing { kind, name, call: call.clone(), bytes, is_orphan: false }
}

/// All objects of `calls`.
fn all(calls: &[Call]) -> Vec<Existing> {
    calls.iter().map(|call| made(call, call.size())).collect()
}

fn lines(plan: &Plan) -> Vec<String> {
    let line = |s: &Step| format!("{:?} {} {}", s.action, s.kind.name(), s.name).to_lowercase();
    plan.steps.iter().map(line).collect()
}

const FILE: &str = r#"
    [[controller]]
    disk = "a"
    queues = 2
    cpumask = "[0,1]"

    [[disk]]
    name = "a"
    file = "a.img"
    size = "20G"
    enospc = "hold"

    [[disk]]
    name = "m"
    memory = true
    size = "1M"

    [[call]]
    method = "bdev_passthru_create"
    params = { name = "p", base_bdev_name = "m" }
"#;

#[test]
fn files_become_calls() {
    let calls = parse(FILE).unwrap();
    let uring = json!({"name": "a", "filename": "/d/a.img", "size": 20_u64 << 30, "enospc": "hold"});
    assert_eq!(calls[0], Call::new("bdev_uring_create", uring));
    assert_eq!(calls[1].size(), Some(1 << 20));
    assert_eq!(calls[2].base(), Some("m"));
    let controller =
        json!({"ctrlr": "a", "dev_name": "a", "exclusive": true, "num_queues": 2, "cpumask": "[0,1]"});
    assert_eq!(calls[3], Call::new("vhost_create_blk_controller", controller));
    let same = r#"{"disk": [{"name": "n", "null": true, "size": 4096}]}"#;
    assert_eq!(parse(same).unwrap()[0].name().unwrap(), "n");
}

#[test]
fn spdk_files_are_read() {
    let text = r#"{"subsystems": [
        {"subsystem": "keyring", "config": null},
        {"subsystem": "bdev", "config": [
            {"method": "bdev_set_options", "params": {"bdev_io_pool_size": 65535}},
            {"method": "bdev_malloc_create", "params": {"name": "M", "num_blocks": "8", "block_size": 512}},
            {"method": "bdev_wait_for_examine"}]}]}"#;
    let calls = parse(text).unwrap();
    assert_eq!(calls.len(), 3);
    assert_eq!((calls[0].kind(), calls[1].kind()), (Kind::Setting, Kind::Disk));
    assert_eq!(calls[1].size(), Some(4096));
}

#[test]
fn errors_name_the_place_and_the_cause() {
    let wrong = [
        ("[[disk]]\nname = \"a\"", "disk 'a': give it one of"),
        ("[[disk]]\nname = \"a\"\nnull = true", "size is missing"),
        ("[[disk]]\nname = \"a\"\nnull = true\nsize = \"1.3G\"", "not a whole number of bytes"),
        ("[[disk]]\nname = \"a\"\nnull = true\nsize = \"1G\"\nreadonly = true", "are for files"),
        ("[[disk]]\nname = \"a\"\nfiel = \"x\"", "line 3"),
        ("[[disks]]\nname = \"a\"", "unknown field"),
        ("{\"disk\": 3}", "invalid type"),
        ("{", "line 1"),
    ];
    for (text, what) in wrong {
        let error = parse(text).unwrap_err();
        assert!(error.contains(what), "{text}: {error}");
    }
}

#[test]
fn a_second_run_has_no_steps() {
    let calls = parse(FILE).unwrap();
    let first = plan(&calls, &[], &[], false);
    assert_eq!(lines(&first), ["create disk a", "create disk m", "create disk p", "create controller a"]);
    let second = plan(&calls, &all(&calls), &[], true);
    assert!(second.steps.is_empty() && second.replaces.is_empty(), "{second:?}");
}

#[test]
fn the_daemons_notation_equals_the_files() {
    let one = |method: &str, params: Value| Call::new(method, params);
    let wanted = json!({"ctrlr": "c", "dev_name": "d", "cpumask": "[0,2-3]", "transport": "vhost_user_blk"});
    let saved = json!({"ctrlr": "c", "dev_name": "d", "readonly": false, "cpumask": "0xd"});
    assert!(one(call::CONTROLLER, wanted).is_same(&one(call::CONTROLLER, saved)));
    let wanted = json!({"name": "n", "num_blocks": "8", "block_size": 512, "md_size": 0, "uuid": "AB"});
    let saved = json!({"name": "n", "num_blocks": 8, "block_size": 512, "uuid": "ab"});
    assert!(one("bdev_null_create", wanted.clone()).is_same(&one("bdev_null_create", saved)));
    let other = json!({"name": "n", "num_blocks": 9, "block_size": 512});
    let differences = one("bdev_null_create", wanted).differences(&one("bdev_null_create", other));
    assert_eq!(differences, ["num_blocks: 9 to be 8", "uuid: unset to be ab"]);
    let readonly = one("bdev_uring_create", json!({"name": "f", "filename": "/f", "readonly": true}));
    let unsaid = one("bdev_uring_create", json!({"name": "f", "filename": "/f"}));
    assert_eq!(unsaid.differences(&readonly), ["readonly: true to be unset"]);
}

#[test]
fn values_are_compared_as_the_daemon_does() {
    let known: Value =
        serde_json::from_str(include_str!("../../../../crates/rpc/data/comparison.json")).unwrap();
    assert_eq!(known["unheeded"], json!(call::IGNORED));
    for (member, same) in [("same", true), ("different", false)] {
        for case in known[member].as_array().unwrap() {
            let param = case[0].as_str().unwrap();
            assert_eq!(call::means_the_same(param, &case[1], &case[2]), same, "{case}");
            assert_eq!(call::means_the_same(param, &case[2], &case[1]), same, "{case}, turned round");
        }
    }
    let null = Call::new("bdev_null_create", json!({"name": "n", "uuid": null, "md_size": null}));
    let saved = Call::new("bdev_null_create", json!({"name": "n", "uuid": "ab", "md_size": 0}));
    assert!(null.differences(&saved).is_empty(), "null equals an absent parameter");
}

#[test]
fn a_key_is_created_once_and_shown_nowhere() {
    let secret = "00112233445566778899aabbccddeeff";
    let wanted = Call::new(call::KEY, json!({"name": "k", "cipher": "AES_XTS", "key": secret, "key2": "0f"}));
    let first = plan(std::slice::from_ref(&wanted), &[], &[], false);
    assert_eq!(first.steps[0].why, "key k");
    assert!(!serde_json::to_string(&first.steps).unwrap().contains(secret));
    let there =
        |mode: &str| Call::new(call::KEY, json!({"name": "k", "cipher": "AES_XTS", "tweak_mode": mode}));
    assert!(plan(std::slice::from_ref(&wanted), &[], &[there("SIMPLE_LBA")], false).steps.is_empty());
    assert_eq!(plan(&[wanted], &[], &[there("INCR_512_FULL_LBA")], false).steps.len(), 1);
}

#[test]
fn sizes_grow_in_place_and_never_shrink() {
    let calls = parse(FILE).unwrap();
    let mut existing = all(&calls);
    existing[0].bytes = Some(10 << 30);
    let grown = plan(&calls, &existing, &[], false);
    assert_eq!(lines(&grown), ["grow disk a"]);
    assert_eq!(grown.steps[0].call.params["size"], 20_u64 << 30);
    existing[0].bytes = Some(30 << 30);
    let shrunk = plan(&calls, &existing, &[], false);
    assert!(shrunk.conflicts[0].contains("would lose data"), "{shrunk:?}");
}

#[test]
fn recreating_a_disk_recreates_the_disks_on_top() {
    let calls = parse(FILE).unwrap();
    let mut changed = calls.clone();
    changed[1].params["num_blocks"] = json!(4096);
    let plan = plan(&changed, &all(&calls), &[], false);
    assert_eq!(lines(&plan), ["remove disk p", "remove disk m", "create disk m", "create disk p"]);
    assert!(plan.replaces[0].contains("its data is lost"), "{plan:?}");
}

#[test]
fn objects_outside_the_file_stay_unless_pruned() {
    let calls = parse(FILE).unwrap();
    let (wanted, existing) = (&calls[1..2], all(&calls));
    assert!(plan(wanted, &existing, &[], false).steps.is_empty());
    let pruned = plan(wanted, &existing, &[], true);
    assert_eq!(lines(&pruned), ["remove controller a", "remove disk p", "remove disk a"]);
    assert!(pruned.replaces.is_empty());
    let mut changed = calls[1].clone();
    changed.params["num_blocks"] = json!(1);
    let in_use = plan(&[changed], &existing, &[], false);
    assert!(in_use.conflicts[0].contains("'p' is on disk 'm'"), "{in_use:?}");
}

#[test]
fn orphans_are_recreated_without_replace() {
    let calls = parse(FILE).unwrap();
    let mut existing = all(&calls[3..]);
    existing[0].is_orphan = true;
    let plan = plan(&calls, &existing, &[], false);
    assert_eq!(lines(&plan)[0], "remove controller a");
    assert_eq!(lines(&plan).last().unwrap(), "create controller a");
    assert!(plan.replaces.is_empty());
}

#[test]
fn settings_and_contradictions() {
    let options = Call::new("bdev_set_options", json!({"x": 1}));
    assert_eq!(
        lines(&plan(std::slice::from_ref(&options), &[], &[], true)),
        ["set setting bdev_set_options"]
    );
    assert!(plan(std::slice::from_ref(&options), &[], std::slice::from_ref(&options), true).steps.is_empty());
    let null = Call::new("bdev_null_create", json!({"name": "n"}));
    assert!(plan(&[null.clone(), null], &[], &[], false).conflicts[0].contains("twice"));
    let nameless = Call::new("bdev_malloc_create", json!({}));
    assert!(plan(&[nameless], &[], &[], false).conflicts[0].contains("no name"));
    let on = |name: &str, base: &str| {
        Call::new("bdev_passthru_create", json!({"name": name, "base_bdev_name": base}))
    };
    let circle = plan(&[on("a", "b"), on("b", "a")], &[], &[], false);
    assert!(circle.conflicts[0].contains("on each other: a, b"), "{circle:?}");
}

#[test]
fn a_written_file_parses_to_the_same_calls() {
    let mut calls = parse(FILE).unwrap();
    let odd =
        json!({"name": "o", "num_blocks": 8, "block_size": 512, "optimal_io_boundary": 4, "uuid": null});
    calls.push(Call::new("bdev_malloc_create", odd));
    for as_json in [false, true] {
        let text = document::write(&calls, |_| Some(20 << 30), as_json).unwrap();
        assert!(text.contains("20G") && text.contains("optimal_io_boundary"), "{text}");
        let plan = plan(&parse(&text).unwrap(), &all(&calls), &[], true);
        assert!(plan.steps.is_empty() && plan.conflicts.is_empty(), "{plan:?}\n{text}");
    }
}

proptest! {
    /// After any part of a plan, the plan for the rest leads to the same state.
    #[test]
    fn an_interrupted_plan_is_finished(present in 0_usize..16, wanted in 0_usize..16, done: prop::sample::Index) {
        let calls = parse(FILE).unwrap();
        let pick = |bits: usize| -> Vec<Call> {
            // A disk on top comes with its base.
            let bits = bits | usize::from(bits & 4 > 0) << 1 | usize::from(bits & 8 > 0);
            calls.iter().enumerate().filter(|(i, _)| bits >> i & 1 > 0).map(|(_, c)| c.clone()).collect()
        };
        let (mut there, wanted) = (all(&pick(present)), pick(wanted));
        let first = plan(&wanted, &there, &[], true);
        carry_out(&first.steps[..done.index(first.steps.len() + 1)], &mut there);
        carry_out(&plan(&wanted, &there, &[], true).steps, &mut there);
        let names = |calls: Vec<String>| calls.into_iter().collect::<std::collections::BTreeSet<_>>();
        let ends = there.iter().map(|e| format!("{:?} {}", e.kind, e.name)).collect();
        let asked = wanted.iter().map(|c| format!("{:?} {}", c.kind(), c.name().unwrap())).collect();
        prop_assert_eq!(names(ends), names(asked));
    }
}

/// Carries out steps as the daemon would; a disk without its base fails.
fn carry_out(steps: &[Step], there: &mut Vec<Existing>) {
    for step in steps {
        match step.action {
            Action::Create => {
                let base = step.call.base();
                assert!(base.is_none() || there.iter().any(|e| e.call.is_called(base)), "{step:?}");
                there.push(made(&step.call, step.call.size()));
            }
            Action::Remove => there.retain(|e| (e.kind, &e.name) != (step.kind, &step.name)),
            Action::Forget | Action::Grow | Action::Set => panic!("{step:?}"),
        }
    }
}

const LIMITED: &str = r#"
    [[group]]
    name = "vm1"
    limits = { iops = "6k" }

    [[group]]
    name = "inner"
    parent = "vm1"

    [[disk]]
    name = "n"
    null = true
    size = "1M"
    group = "inner"
    limits = { iops = 3000, bandwidth = "125M", burst = "2s", combined = true }
"#;

/// The disk and the settings of a file.
fn limited(text: &str) -> (Vec<Call>, Vec<Existing>, Vec<Call>) {
    let calls = parse(text).unwrap();
    let (settings, disks): (Vec<_>, Vec<_>) = calls.iter().cloned().partition(|c| c.kind() == Kind::Setting);
    (calls, all(&disks), settings)
}

#[test]
fn limits_are_set_once_and_unset() {
    let (calls, disks, settings) = limited(LIMITED);
    let methods: Vec<_> = calls.iter().map(|call| call.method.as_str()).collect();
    assert_eq!(
        methods,
        [
            "bdev_qos_group_create",
            "bdev_qos_group_set_limit",
            "bdev_qos_group_create",
            "bdev_null_create",
            "bdev_set_qos_limit",
            "bdev_qos_group_add_bdev",
        ]
    );
    assert_eq!(calls[4].params["rw_mbytes_per_sec"], 125);
    assert_eq!(calls[4].params["w_ios_per_sec"], 0);
    assert!(plan(&calls, &disks, &settings, true).steps.is_empty());
    let changed = LIMITED.replace("3000", "4000");
    assert_eq!(
        lines(&plan(&limited(&changed).0, &disks, &settings, true)),
        ["set setting bdev_set_qos_limit"]
    );
    let without = "[[disk]]\nname = \"n\"\nnull = true\nsize = \"1M\"";
    let unset = plan(&limited(without).0, &disks, &settings, true);
    assert_eq!(
        lines(&unset),
        [
            "set setting bdev_qos_group_remove_bdev",
            "set setting bdev_set_qos_limit",
            "set setting bdev_qos_group_delete",
            "set setting bdev_qos_group_delete",
        ]
    );
    assert_eq!(
        (unset.steps[2].call.text("name"), unset.steps[3].call.text("name")),
        (Some("inner"), Some("vm1"))
    );
    assert_eq!(unset.steps[1].call.params["rw_ios_per_sec"], 0);
    // A recreated disk has none of the old one's limits.
    let recreated = LIMITED.replace("null = true", "memory = true");
    let recreated = lines(&plan(&limited(&recreated).0, &disks, &settings, false));
    let set = ["set setting bdev_set_qos_limit", "set setting bdev_qos_group_add_bdev"];
    assert_eq!(recreated, [["remove disk n", "create disk n"], set].concat());
    let elsewhere = LIMITED.replace("parent = \"vm1\"", "");
    assert_eq!(plan(&limited(&elsewhere).0, &disks, &settings, false).conflicts.len(), 1);
}

#[test]
fn a_sleep_policy_is_set_once_and_unset() {
    const QUIET: &str = r#"
        [[disk]]
        name = "n"
        null = true
        size = "1M"

        [[controller]]
        disk = "n"
        name = "vm"
        sleep_policy = "interrupt"
    "#;
    let (calls, objects, settings) = limited(QUIET);
    assert_eq!(settings.len(), 1);
    assert_eq!(Value::Object(settings[0].params.clone()), json!({"ctrlr": "vm", "policy": "interrupt"}));
    assert!(plan(&calls, &objects, &settings, false).steps.is_empty());
    let steps = |text: &str| {
        let plan = plan(&limited(text).0, &objects, &settings, false);
        plan.steps
            .iter()
            .map(|step| (step.call.method.clone(), step.call.text("policy").map(str::to_owned)))
            .collect::<Vec<_>>()
    };
    let set = |policy: &str| ("aryk_controller_set_sleep_policy".to_owned(), Some(policy.to_owned()));
    assert_eq!(steps(&QUIET.replace("interrupt", "poll")), [set("poll")]);
    assert_eq!(steps(&QUIET.replace("sleep_policy = \"interrupt\"", "")), [set("default")]);
    assert_eq!(steps(&QUIET.replace("\"interrupt\"", "\"default\"")), [set("default")]);
    // A recreated controller has none of the old one's settings.
    let recreated = steps(&QUIET.replace("name = \"vm\"", "name = \"vm\"\nqueues = 2"));
    assert_eq!(recreated.last(), Some(&set("interrupt")));
    assert_eq!(recreated.len(), 3);
    for as_json in [false, true] {
        let text = document::write(&calls, |_| None, as_json).unwrap();
        assert_eq!(parse(&text).unwrap(), calls, "{text}");
    }
}

#[test]
fn written_limits_parse_to_the_same_limits() {
    let calls = parse(LIMITED).unwrap();
    for as_json in [false, true] {
        let text = document::write(&calls, |_| None, as_json).unwrap();
        assert_eq!(parse(&text).unwrap(), calls, "{text}");
        assert!(!text.contains("call"), "{text}");
    }
    let orphan = limits::add("g", "p");
    let text = document::write(std::slice::from_ref(&orphan), |_| None, false).unwrap();
    assert_eq!(parse(&text).unwrap(), [orphan]);
}

#[test]
fn calls_without_effect_are_recognized() {
    let has_no_effect = |method: &str| super::has_no_effect(&Call::new(method, json!({})));
    for method in ["bdev_examine", "bdev_set_options", "nvmf_set_config", "sock_set_default_impl"] {
        assert!(has_no_effect(method), "{method}");
    }
    for method in ["bdev_null_create", "bdev_set_qos_limit", "vhost_controller_set_coalescing"] {
        assert!(!has_no_effect(method), "{method}");
    }
}

#[test]
fn a_recreated_disk_keeps_its_uuid() {
    let calls = parse(FILE).unwrap();
    let mut existing = all(&calls);
    for disk in existing.iter_mut().filter(|e| e.kind == Kind::Disk) {
        disk.call.params.insert("uuid".into(), json!(format!("old-{}", disk.name)));
    }
    let made = |changed: &[Call]| -> Vec<Option<String>> {
        let plan = plan(changed, &existing, &[], true);
        let made = plan.steps.iter().filter(|step| step.action == Action::Create);
        made.map(|step| step.call.text("uuid").map(str::to_owned)).collect()
    };
    let mut changed = calls.clone();
    changed[1].params["num_blocks"] = json!(4096);
    assert_eq!(made(&changed), [Some("old-m".into()), Some("old-p".into())], "and the disk on top of it");
    changed[1].params.insert("uuid".into(), json!("new"));
    assert_eq!(made(&changed)[0].as_deref(), Some("new"));
    // The controller has no uuid.
    changed = calls.clone();
    changed[0].params["enospc"] = json!("error");
    assert_eq!(made(&changed), [Some("old-a".into()), None]);
}

#[test]
fn a_plan_names_disks_whose_data_is_lost() {
    let calls = parse(FILE).unwrap();
    let pruned = plan(&[], &all(&calls), &[], true);
    let lost: Vec<_> = pruned.steps.iter().filter(|step| step.why.contains("its data is lost")).collect();
    assert!(lost.len() == 1 && lost[0].name == "m", "{pruned:?}");
}

#[test]
fn absent_objects_are_pruned_first_and_top_down() {
    let calls = parse(FILE).unwrap();
    let mut pruned = plan(&calls[1..2], &[], &[], true);
    pruned.prune_absent(&calls, &calls[1..2]);
    assert_eq!(lines(&pruned), ["forget controller a", "forget disk a", "forget disk p", "create disk m"]);
}
