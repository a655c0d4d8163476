//! Headers that are damaged, contradict themselves, or want too much: errors without panics, and bounded work.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io;
use std::num::NonZeroU32;

use aryk_luks::{
    Argon2Variant, Cipher, Error, Hash, Header, Kdf, Limits, Options, Priority, Store, Version, format,
};
use proptest::prelude::*;
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};

const SECRET: &[u8] = b"secret";
const V1_LEN: usize = 2 << 20;
const V2_LEN: usize = 16 << 20;
/// Bytes of a copy of a LUKS2 header.
const COPY: usize = 16 << 10;
/// Bytes before its JSON text.
const BINARY: usize = 4096;
const SEQUENCE: usize = 16;
const CHECKSUM: std::ops::Range<usize> = 448..512;

const KDF: Kdf = Kdf::Pbkdf2 { hash: Hash::Sha256, iterations: NonZeroU32::new(1000).unwrap() };

fn new(version: Version) -> Vec<u8> {
    let label = if version == Version::V2 { "label" } else { "" }.into();
    let options =
        Options { version, cipher: Cipher::Aes256Xts, sector_size: 512, kdf: KDF, label, uuid: None };
    let mut store = vec![0; if version == Version::V2 { V2_LEN } else { V1_LEN }];
    format(&mut store, &options, SECRET).unwrap_or_else(|error| panic!("{error}"));
    store
}

fn read(store: &mut Vec<u8>) -> Result<Header, Error> {
    Header::read(store, &Limits::default())
}

/// Reads and unlocks; the number of the key slot, or the error's text.
fn unlock(store: &mut Vec<u8>, limits: &Limits) -> Result<u32, String> {
    let header = Header::read(store, limits).map_err(|error| error.to_string())?;
    header
        .unlock(store, SECRET, None, limits)
        .map(|unlocked| unlocked.slot)
        .map_err(|error| error.to_string())
}

fn json_of(store: &[u8]) -> Value {
    let area = &store[BINARY..COPY];
    let end = area.iter().position(|&byte| byte == 0).unwrap();
    serde_json::from_slice(&area[..end]).unwrap()
}

/// Replaces the text of both copies.
fn set_json(store: &mut [u8], text: &[u8]) {
    for start in [0, COPY] {
        let area = &mut store[start + BINARY..start + COPY];
        area.fill(0);
        area[..text.len()].copy_from_slice(text);
        set_checksum(&mut store[start..start + COPY]);
    }
}

fn set_checksum(copy: &mut [u8]) {
    copy[CHECKSUM].fill(0);
    let checksum = digest(&SHA256, copy);
    copy[CHECKSUM.start..][..32].copy_from_slice(checksum.as_ref());
}

/// What a LUKS2 header whose text has `value` at `pointer` leads to.
fn with_value(store: &mut Vec<u8>, pointer: &str, value: Value) -> Result<u32, String> {
    let original = json_of(store);
    let mut json = original.clone();
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    json.pointer_mut(parent).unwrap()[name] = value;
    set_json(store, json.to_string().as_bytes());
    let result = unlock(store, &Limits::default());
    set_json(store, original.to_string().as_bytes());
    result
}

#[test]
fn what_is_not_supported_or_invalid_is_named() {
    let mut store = new(Version::V2);
    let keyslot = json_of(&store)["keyslots"]["0"].clone();
    let cases = [
        (
            "/segments/0/encryption",
            json!("serpent-xts-plain64"),
            "cipher \"serpent-xts-plain64\" is not supported",
        ),
        ("/segments/0/encryption", json!("aes-xts-plain"), "cipher \"aes-xts-plain\""),
        ("/segments/0/type", json!("linear"), "segment \"linear\""),
        ("/segments/0/type", json!("hw-opal-crypt"), "segment \"hw-opal-crypt\""),
        ("/segments/0/integrity", json!({"type": "hmac(sha256)"}), "integrity \"hmac(sha256)\""),
        ("/segments/0/flags", json!(["in-reencryption"]), "segment flag \"in-reencryption\""),
        ("/segments/0/sector_size", json!(8192), "sectors of 8192 bytes"),
        ("/segments/0/offset", json!("16777215"), "is not aligned"),
        ("/segments/0/offset", json!("32768"), "overlaps the header"),
        ("/segments/0/offset", json!("18446744073709551616"), "decimal number of 64 bits"),
        ("/segments/0/size", json!("0"), "is empty"),
        ("/segments/0/size", json!("513"), "is not aligned"),
        ("/segments/0/size", json!("18446744073709551104"), "is not aligned, is empty"),
        ("/segments/1", json!({}), "number of segments: 2"),
        ("/segments/x", json!({}), "has the number \"x\""),
        (
            "/config/requirements",
            json!({"mandatory": ["online-reencrypt-v2"]}),
            "requirement \"online-reencrypt-v2\"",
        ),
        ("/config/json_size", json!("4096"), "sizes of the JSON text differ"),
        ("/config/keyslots_size", json!("18446744073709551615"), "size of its key slots"),
        ("/config/keyslots_size", json!("4096"), "not in the part for key slots"),
        ("/digests/0/type", json!("crc"), "digest \"crc\""),
        ("/digests/0/hash", json!("whirlpool"), "hash \"whirlpool\""),
        ("/digests/0/iterations", json!(0), "iterations that is not a positive number"),
        ("/digests/0/digest", json!("AAAA"), "too short"),
        ("/digests/0/segments", json!(["1"]), "has no digest"),
        ("/digests/0/keyslots", json!([]), "no key slot opens its data"),
        ("/digests/0/keyslots", json!(["0", "4"]), "key slot of its digest is missing"),
        ("/keyslots/0/type", json!("reencrypt"), "key slot \"reencrypt\""),
        ("/keyslots/0/key_size", json!(48), "with a key of 48 bytes"),
        ("/keyslots/0/af/stripes", json!(0), "stripes that is not a positive number"),
        ("/keyslots/0/af/stripes", json!(4_000_000_000_u32), "4000000000 stripes"),
        ("/keyslots/0/af/stripes", json!(4100), "too small for its key"),
        ("/keyslots/0/area/type", json!("journal"), "key slot area \"journal\""),
        ("/keyslots/0/area/encryption", json!("aes-cbc-plain64"), "cipher \"aes-cbc-plain64\""),
        ("/keyslots/0/area/offset", json!("4096"), "not in the part for key slots"),
        ("/keyslots/0/area/size", json!("18446744073709551615"), "not in the part for key slots"),
        ("/keyslots/0/kdf/type", json!("scrypt"), "key derivation \"scrypt\""),
        ("/keyslots/0/kdf/salt", json!("A".repeat(100)), "at most 64 bytes"),
        (
            "/keyslots/0/kdf/iterations",
            json!(4_000_000_000_u32),
            "key slot 0 needs 0 bytes of memory and 8000001000 steps",
        ),
        ("/keyslots/1", keyslot, "overlaps another one"),
        ("/keyslots/32", json!({}), "has the number \"32\""),
        ("/keyslots/0/priority", json!(3), "unknown priority"),
        ("/keyslots/0/priority", json!(0), "no key slot opens"),
    ];
    for (pointer, value, expected) in cases {
        let error = with_value(&mut store, pointer, value.clone()).unwrap_err();
        assert!(error.contains(expected), "{pointer} = {value}: {error}");
    }
}

#[test]
fn what_a_header_may_have_besides_is_accepted() {
    let mut store = new(Version::V2);
    for (pointer, value) in [
        ("/keyslots/0/priority", json!(2)),
        ("/segments/0/size", json!("4096")),
        ("/segments/0/iv_tweak", json!("18446744073709551615")),
        ("/config/requirements", json!({"mandatory": []})),
        ("/config/unknown", json!([1, {"x": null}])),
        ("/tokens/0", json!({"type": "other", "keyslots": ["0"]})),
    ] {
        assert_eq!(with_value(&mut store, pointer, value.clone()), Ok(0), "{pointer} = {value}");
    }
}

#[test]
fn argon2_takes_no_more_memory_than_the_limit() {
    let mut store = new(Version::V2);
    let argon2 = |time: u32, memory: u32, cpus: u32| json!({"type": "argon2id", "time": time, "memory": memory, "cpus": cpus, "salt": "AAAAAAAAAAAAAAAAAAAAAA=="});
    for (kdf, expected) in [
        (argon2(4, 4 << 20, 4), "needs 4294967296 bytes of memory"),
        (argon2(4_000_000_000, 1024, 1), "steps of key derivation"),
        (argon2(1, 16, 4), "Argon2 cannot have"),
        (argon2(1, 1024, u32::MAX), "Argon2 cannot have"),
        (argon2(1, 64, 1), "no key slot opens with this passphrase"),
    ] {
        let error = with_value(&mut store, "/keyslots/0/kdf", kdf.clone()).unwrap_err();
        assert!(error.contains(expected), "{kdf}: {error}");
    }
}

#[test]
fn the_text_is_bounded_before_it_is_parsed() {
    let mut store = new(Version::V2);
    let nested = format!("{{\"a\":{}{}}}", "[".repeat(500), "]".repeat(500));
    let many = format!("{{\"a\":[{}0]}}", "0,".repeat(5900));
    let escaped = format!("{{\"a\":\"{}\\\"{}\"}}", "[".repeat(500), "{,".repeat(500));
    for (text, expected) in [
        (nested.as_bytes(), "too deep"),
        (b"[]".as_slice(), "no JSON object: line 1"),
        (b"\"private\"", "no JSON object: line 1"),
        (b"{\"a\":", "no JSON object: line 1"),
        (b"", "no JSON object: line 1"),
        (b"{\"a\":\"\xff\"}", "no JSON object: line 1"),
        (many.as_bytes(), "has no config"),
        (escaped.as_bytes(), "has no config"),
    ] {
        set_json(&mut store, text);
        let error = read(&mut store).unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains("private"), "{error}");
    }
    set_json(&mut store, many.as_bytes());
    let limits = Limits { json_values_max: 5000, ..Limits::default() };
    assert!(Header::read(&mut store, &limits).unwrap_err().to_string().contains("more values"));
    let limits = Limits { json_len_max: 4096, ..Limits::default() };
    assert!(Header::read(&mut store, &limits).unwrap_err().to_string().contains("12288 bytes for JSON text"));
    set_json(&mut store, &[b' '; COPY - BINARY]);
    assert!(read(&mut store).unwrap_err().to_string().contains("has no end"));
}

#[test]
fn the_newer_whole_copy_is_used() {
    let original = new(Version::V2);
    for damage in [0, 6, 7, 8, 100, 300, CHECKSUM.start, BINARY + 10, COPY - 1] {
        for start in [0, COPY] {
            let mut store = original.clone();
            store[start + damage] ^= 1;
            let mut header = read(&mut store).unwrap();
            assert!(header.is_degraded(), "byte {damage} of the copy at {start}");
            assert_eq!(unlock(&mut store, &Limits::default()), Ok(0));
            assert!(header.repair(&mut store).unwrap());
            let mut repaired = read(&mut store).unwrap();
            assert!(!repaired.is_degraded() && !repaired.repair(&mut store).unwrap());
            assert_eq!(unlock(&mut store, &Limits::default()), Ok(0));
        }
        let mut store = original.clone();
        store[damage] ^= 1;
        store[COPY + damage] ^= 1;
        assert!(read(&mut store).is_err(), "byte {damage} of both copies");
    }
    assert!(!read(&mut original.clone()).unwrap().is_degraded());

    // Another text in a copy that is newer, or older.
    for (start, sequence, is_used) in [(0, 9_u64, true), (0, 0, false), (COPY, 9, true), (COPY, 0, false)] {
        let mut store = original.clone();
        let mut json = json_of(&store);
        json["segments"]["0"]["iv_tweak"] = json!("77");
        let text = json.to_string();
        let copy = &mut store[start..start + COPY];
        copy[BINARY..][..text.len()].copy_from_slice(text.as_bytes());
        copy[SEQUENCE..][..8].copy_from_slice(&sequence.to_be_bytes());
        set_checksum(copy);
        let header = read(&mut store).unwrap();
        assert!(header.is_degraded());
        assert_eq!(header.segment().iv_tweak == 77, is_used, "copy at {start}, sequence {sequence}");
    }
}

/// A store that loses its power after some writes: it reports success for later ones, and keeps nothing.
struct Failing {
    bytes: Vec<u8>,
    writes_left: u32,
    writes: u32,
}

impl Store for Failing {
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.bytes.read_at(offset, buffer)
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.writes += 1;
        match self.writes_left.checked_sub(1) {
            Some(left) => self.writes_left = left,
            None => return Ok(()),
        }
        // The last write is torn.
        let len = if self.writes_left == 0 { data.len() / 2 } else { data.len() };
        self.bytes.write_at(offset, &data[..len])
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_power_failure_during_a_change_leaves_a_header() {
    let original = new(Version::V2);
    // Also from a header with one damaged copy: the good one must remain until the other is repaired.
    for damaged in [None, Some(10), Some(COPY + 10)] {
        let mut before = original.clone();
        if let Some(at) = damaged {
            before[at] ^= 1;
        }
        let mut writes_left = 1;
        loop {
            let mut store = Failing { bytes: before.clone(), writes_left, writes: 0 };
            let mut header = read(&mut store.bytes).unwrap();
            let key = header
                .unlock(&mut store, SECRET, None, &Limits::default())
                .unwrap_or_else(|e| panic!("{e}"))
                .key;
            header.add_key_slot(&mut store, &key, b"other", KDF, None).unwrap();
            assert_eq!(
                unlock(&mut store.bytes, &Limits::default()),
                Ok(0),
                "{damaged:?}, {writes_left} writes"
            );
            if store.writes < writes_left {
                assert!(!read(&mut store.bytes).unwrap().is_degraded(), "every copy was written");
                break;
            }
            writes_left += 1;
        }
        assert_eq!(writes_left, 4, "an area and two copies");
    }
}

#[test]
fn key_slots_are_added_and_removed_within_the_header() {
    for (version, slots) in [(Version::V1, 8), (Version::V2, 32)] {
        let mut store = new(version);
        let mut header = read(&mut store).unwrap();
        let unlocked = header.unlock(&mut store, SECRET, None, &Limits::default());
        let key = unlocked.unwrap_or_else(|error| panic!("{error}")).key;
        let other =
            format(&mut vec![0; V2_LEN], &Options { version: Version::V2, ..options() }, b"").unwrap().1;
        assert!(matches!(header.add_key_slot(&mut store, &other, b"", KDF, None), Err(Error::WrongKey)));
        assert!(matches!(header.remove_key_slot(&mut store, 0), Err(Error::LastSlot(0))));
        assert!(matches!(header.remove_key_slot(&mut store, 5), Err(Error::NoSuchSlot(5))));
        for number in [0, slots, u32::MAX] {
            let result = header.add_key_slot(&mut store, &key, b"", KDF, Some(number));
            assert!(matches!(result, Err(Error::SlotTaken(_))), "{number}: {result:?}");
        }
        for number in 1..slots {
            let secret = number.to_string();
            assert_eq!(header.add_key_slot(&mut store, &key, secret.as_bytes(), KDF, None).unwrap(), number);
        }
        assert!(matches!(header.add_key_slot(&mut store, &key, b"", KDF, None), Err(Error::NoRoom)));
        header.remove_key_slot(&mut store, 3).unwrap();
        assert_eq!(header.add_key_slot(&mut store, &key, b"three", KDF, None).unwrap(), 3);
        assert_eq!(read(&mut store).unwrap().key_slots(), header.key_slots());
        for (secret, number) in [(SECRET, 0), (b"7", 7), (b"three", 3)] {
            let unlocked = header.unlock(&mut store, secret, Some(number), &Limits::default());
            let unlocked = unlocked.unwrap_or_else(|error| panic!("{error}"));
            assert!(unlocked.key.as_bytes() == key.as_bytes() && unlocked.slot == number);
        }
        assert!(header.unlock(&mut store, b"3", Some(3), &Limits::default()).is_err());
    }
}

fn options() -> Options {
    let label = String::new();
    Options { version: Version::V1, cipher: Cipher::Aes256Xts, sector_size: 512, kdf: KDF, label, uuid: None }
}

#[test]
fn options_that_a_format_does_not_have_are_refused() {
    let argon2 = Kdf::Argon2 { variant: Argon2Variant::Id, passes: 1, memory_kib: 64, lanes: 1 };
    let v2 = Options { version: Version::V2, ..options() };
    for options in [
        Options { kdf: argon2, ..options() },
        Options { sector_size: 4096, ..options() },
        Options { label: "label".into(), ..options() },
        Options { sector_size: 8192, ..v2.clone() },
        Options { label: "x".repeat(48), ..v2 },
    ] {
        let error = format(&mut vec![0; V2_LEN], &options, SECRET).err().unwrap();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
    assert!(matches!(format(&mut vec![0; 4096], &options(), SECRET), Err(Error::Io(_))));
}

#[test]
fn a_measured_cost_is_within_its_bounds() {
    let target = std::time::Duration::from_millis(1);
    let Kdf::Pbkdf2 { hash, iterations } = Kdf::pbkdf2_for(Hash::Sha512, target) else { panic!() };
    assert!(hash == Hash::Sha512 && iterations.get() >= 1000);
    let Kdf::Argon2 { passes, memory_kib, .. } = Kdf::argon2id_for(target, 512).unwrap() else { panic!() };
    assert!(passes >= 4 && memory_kib == 512);
}

#[test]
fn other_content_is_no_header() {
    let mut luks3 = new(Version::V1);
    luks3[7] = 3;
    assert!(matches!(read(&mut luks3), Err(Error::Version(3))));
    for mut store in [vec![0; V2_LEN], vec![0xff; 4096], vec![0; 10]] {
        assert!(matches!(read(&mut store), Err(Error::NotLuks)));
    }
    assert!(matches!(read(&mut vec![]), Err(Error::Io(_))));
    let mut truncated = new(Version::V1);
    truncated.truncate(591);
    assert!(matches!(read(&mut truncated), Err(Error::Io(_))));
    let mut truncated = new(Version::V2);
    truncated.truncate(COPY);
    assert!(read(&mut truncated).unwrap().is_degraded());
    assert!(unlock(&mut truncated, &Limits::default()).unwrap_err().contains("cannot be read"));
}

#[test]
fn expensive_key_slots_do_not_hide_cheap_ones() {
    let mut store = new(Version::V2);
    let mut json = json_of(&store);
    let mut slot = json["keyslots"]["0"].clone();
    slot["kdf"]["iterations"] = json!(u32::MAX);
    slot["area"]["offset"] = json!("1048576");
    slot["priority"] = json!(2);
    json["keyslots"]["1"] = slot;
    json["digests"]["0"]["keyslots"] = json!(["0", "1"]);
    set_json(&mut store, json.to_string().as_bytes());
    let header = read(&mut store).unwrap();
    assert_eq!(header.key_slots()[1].priority(), Priority::Prefer);
    assert_eq!(unlock(&mut store, &Limits::default()), Ok(0));
    let error = header.unlock(&mut store, b"wrong", None, &Limits::default()).err().unwrap();
    assert!(matches!(error, Error::TooExpensive { slot: 1, .. }), "{error}");
    let error = unlock(&mut store, &Limits { steps_max: 2999, ..Limits::default() }).unwrap_err();
    assert!(error.contains("key slot 0 needs 0 bytes of memory and 3000 steps"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any change of a LUKS1 header is refused, or leaves one whose parts do not overlap.
    #[test]
    fn changed_luks1_headers(changes in proptest::collection::vec((0..592_usize, any::<u8>()), 1..6)) {
        let mut store = V1.with(|store| store.clone());
        for (at, byte) in changes {
            store[at] = byte;
        }
        let nothing = Limits { steps_max: 0, ..Limits::default() };
        if let Ok(header) = Header::read(&mut store, &nothing) {
            let unlocked = header.unlock(&mut store, SECRET, None, &nothing);
            let is_refused = matches!(unlocked, Err(Error::TooExpensive { .. } | Error::WrongSecret));
            prop_assert!(is_refused, "a derivation without a budget");
            prop_assert!(header.segment().offset == 0 || header.segment().offset >= 4096 + 256_000);
        }
    }

    /// The same for the text of a LUKS2 header.
    #[test]
    fn changed_luks2_headers(changes in proptest::collection::vec((0..900_usize, any::<u8>()), 1..4)) {
        let mut store = V2.with(|store| store.clone());
        for (at, byte) in changes {
            store[BINARY + at] = byte;
        }
        for start in [0, COPY] {
            set_checksum(&mut store[start..start + COPY]);
        }
        let nothing = Limits { steps_max: 0, ..Limits::default() };
        if let Ok(header) = Header::read(&mut store, &nothing) {
            prop_assert!(matches!(header.segment().sector_size, 512 | 1024 | 2048 | 4096));
            prop_assert!(header.segment().offset == 0 || header.segment().offset > 32768);
            prop_assert!(!header.key_slots().is_empty());
            prop_assert!(header.unlock(&mut store, SECRET, None, &nothing).is_err());
        }
    }
}

thread_local! {
    static V1: Vec<u8> = { let mut store = new(Version::V1); store.truncate(4096); store };
    static V2: Vec<u8> = { let mut store = new(Version::V2); store.truncate(2 * COPY); store };
}
