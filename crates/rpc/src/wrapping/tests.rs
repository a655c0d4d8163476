//! Wrapping keys in files, and what they wrap.

use super::*;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use tempfile::TempDir;

const MATERIAL: &[u8] = b"0123456789abcdef0123456789ABCDEF";

fn block_on<R>(future: impl Future<Output = R>) -> R {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

fn wrap(wrapping: &Wrapping, about: &[&str]) -> String {
    block_on(wrapping.key()).unwrap().wrap(about, MATERIAL).unwrap()
}

fn write(path: &Path, content: &[u8], mode: u32) {
    fs::write(path, content).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn material_comes_back_for_the_same_use_only() {
    let wrapping = Wrapping::default();
    let text = wrap(&wrapping, &["a", "bc"]);
    assert_eq!(&*wrapping.unwrap("key 'a'", &["a", "bc"], &text).unwrap(), MATERIAL);
    assert_eq!(id_of(&text), wrapping.id());
    assert_ne!(wrap(&wrapping, &["a", "bc"]), text, "the nonce is random");
    for other in [&["ab", "c"][..], &["a"], &["a", "bc", ""], &[]] {
        let error = wrapping.unwrap("key 'a'", other, &text).unwrap_err();
        assert_eq!(error, UnwrapError::Damaged("key 'a'".into()));
    }
    for (place, byte) in text.bytes().enumerate().skip(text.rfind(':').unwrap() + 1) {
        let mut changed = text.clone().into_bytes();
        changed[place] = if byte == b'A' { b'B' } else { b'A' };
        let changed = String::from_utf8(changed).unwrap();
        assert!(wrapping.unwrap("k", &["a", "bc"], &changed).is_err(), "{place}");
    }
    for cut in 0..text.len() {
        assert!(wrapping.unwrap("k", &["a", "bc"], &text[..cut]).is_err(), "{cut}");
    }
}

#[test]
fn the_own_key_is_created_once_and_found_again() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("wrapping.key");
    let wrapping = Wrapping::read(Source::Own(path.clone()));
    assert_eq!((wrapping.id(), wrapping.why_not()), (None, None));
    assert!(!path.exists(), "no key was needed yet");
    let text = wrap(&wrapping, &[]);
    let metadata = fs::metadata(&path).unwrap();
    assert_eq!((metadata.len(), metadata.mode() & 0o777), (32, 0o600));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    let again = Wrapping::read(Source::Own(path.clone()));
    assert_eq!(&*again.unwrap("k", &[], &text).unwrap(), MATERIAL);
    // Another daemon has created the file meanwhile: it is left alone.
    let late = Wrapping { source: Source::Own(path.clone()), ..Wrapping::default() };
    let before = fs::read(&path).unwrap();
    assert_eq!(block_on(late.key()).unwrap_err().code(), -17);
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[test]
fn a_file_that_was_left_by_a_killed_daemon_does_not_matter() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("wrapping.key.new"), "half").unwrap();
    let wrapping = Wrapping::read(Source::Own(dir.path().join("wrapping.key")));
    wrap(&wrapping, &[]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_missing_or_other_key_is_named() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("k");
    let text = wrap(&Wrapping::default(), &[]);
    let id = id_of(&text).unwrap();
    let missing = Wrapping::read(Source::Own(path.clone())).unwrap("key 'k1'", &[], &text).unwrap_err();
    let path = path.display();
    let expected = format!(
        "key 'k1' is wrapped by the wrapping key with id {id}, but the wrapping key {path} does not exist"
    );
    assert_eq!(missing.to_string(), expected);
    let file = Wrapping::read(Source::File(dir.path().join("k")));
    assert_eq!(file.why_not(), Some(&*format!("the wrapping key {path} does not exist")));
    assert_eq!(block_on(file.key()).unwrap_err().code(), -Errno::NOKEY.raw_os_error());
    write(&dir.path().join("k"), &[7; 32], 0o600);
    let other = Wrapping::read(Source::File(dir.path().join("k")));
    let ours = other.id().unwrap();
    let expected = format!(
        "the wrapping key {path} is not the one that key 'k1' was wrapped by: its id is {ours}, and {id} is needed"
    );
    assert_eq!(other.unwrap("key 'k1'", &[], &text).unwrap_err().to_string(), expected);
    let plain = other.unwrap("key 'k1'", &[], "00112233445566778899aabbccddeeff").unwrap_err().to_string();
    assert_eq!(plain, "the state store has key 'k1' without its key material wrapped");
}

#[test]
fn files_of_all_kinds() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("k");
    let read = |content: &[u8], mode| {
        write(&path, content, mode);
        Wrapping::read(Source::File(path.clone()))
    };
    let bytes = read(&[0xab; 32], 0o600);
    for digits in [format!("{}\n", "ab".repeat(32)), format!(" {}", "AB".repeat(32))] {
        assert_eq!(read(digits.as_bytes(), 0o400).id(), bytes.id());
    }
    for wrong in
        [&b""[..], &[1; 31], &[1; 33], "ab".repeat(33).as_bytes(), "xb".repeat(32).as_bytes(), &[1; 5000]]
    {
        let wrapping = read(wrong, 0o600);
        assert!(
            wrapping.id().is_none() && wrapping.why_not().unwrap().contains("neither 32 bytes"),
            "{wrong:?}"
        );
    }
    let open = read(&[1; 32], 0o640);
    assert!(open.why_not().unwrap().ends_with("other users have rights to it (mode 640): 'chmod 600' it"));
    assert!(Wrapping::read(Source::Credential(path.clone())).id().is_some(), "the service manager decides");
    let dir = Wrapping::read(Source::File(dir.path().to_owned()));
    assert!(dir.why_not().is_some() && dir.id().is_none());
    let keyring = Wrapping::read(Source::Keyring("aryk-test-no-such-key".into()));
    assert!(
        keyring
            .why_not()
            .unwrap()
            .starts_with("the wrapping key keyring:aryk-test-no-such-key cannot be read")
    );
}

#[test]
fn nothing_prints_the_key() {
    let wrapping = Wrapping::default();
    let key = block_on(wrapping.key()).unwrap();
    let id = key.id();
    assert_eq!(format!("{key:?}"), format!("WrappingKey({id})"));
    assert!(!format!("{wrapping:?}").contains(&hex(&key.bytes)));
}
