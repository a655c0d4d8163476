//! Vectors: the texts and the identities of version 1 are those of libnvme's own tests; the secrets were computed by another
//! implementation of HKDF. Names there are not NQNs that [`Nqn`] accepts.

use super::*;

const HOST: &str = "nqn.psk-test-host";
const SUBSYSTEM: &str = "nqn.psk-test-subsys";
const PLAIN_32: &str = "NVMeTLSkey-1:00:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
const SHA256: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
const PLAIN_48: &str =
    "NVMeTLSkey-1:00:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";
const SHA384: &str =
    "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The identity's end, behind the names, and the secret.
fn derived(text: &str, version: Version) -> (String, String) {
    let psk = ConfiguredPsk::parse(text.as_bytes()).expect("a key");
    let psk = psk.derive(version, HOST, SUBSYSTEM).expect("short names");
    let [first, host, subsystem, rest @ ..] = &psk.identity.split(' ').collect::<Vec<_>>()[..] else {
        panic!("an identity of three words at least: {}", psk.identity)
    };
    assert_eq!([*host, *subsystem], [HOST, SUBSYSTEM]);
    assert_eq!(names_of(&psk.identity), Some((HOST, SUBSYSTEM)));
    assert_eq!(psk.secret.len(), psk.hash.value_len());
    ([&[*first], rest].concat().join(" "), hex(&psk.secret))
}

#[test]
fn known_keys_give_known_identities_and_secrets() {
    let cases = [
        (
            SHA256,
            Version::Names,
            "NVMe0R01",
            "05c6503551ad136e6ee32e6eeb3f6d500b69701d84ec71e328f65c7f51566f68",
        ),
        (
            SHA256,
            Version::Digest,
            "NVMe1R01 iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU=",
            "8fc3c0badfd4c0c66fa3ca33aadd0314f85536cc9bc47338b60f3e6e563786ca",
        ),
        (
            SHA384,
            Version::Names,
            "NVMe0R02",
            "f42ba63824cdfe421914c582921f85b5b5b7e2d4df084caeedc9be20b212e8bb0fe8a23e9d59a1c8fc6449da4970a78d",
        ),
        (
            SHA384,
            Version::Digest,
            "NVMe1R02 QhW2+Rp6RzHlNtCslyRxMnwJ11tKKhz8JCAQpQ+XUD8f9td1VeH5h53yz2wKJG1a",
            "a2b2f943f479fc682555cec89857c80ed004ce92f32a973d5764155bb7e36b17a85368a0666d250afac9282dda2e62ca",
        ),
        (
            PLAIN_32,
            Version::Names,
            "NVMe0R01",
            "ec85300ba827726bd3bc4fc07f3a34aec5fe7c8ccac05fefc2f021c74e0df9ef",
        ),
        (
            PLAIN_48,
            Version::Digest,
            "NVMe1R02 dyoPfSR5TBRaPMI5/FXUlJv2XMDtmQ7Q9Xrj89aBKbyRYkQeT5V1wNvIpnMDRTQW",
            "1569317890995e207ab4cf148bc53470561e148030cb019b1d87fb4bc5794a791ed5ee68676c952ce5f11f3786e900d4",
        ),
    ];
    for (text, version, identity, secret) in cases {
        assert_eq!(derived(text, version), (identity.to_owned(), secret.to_owned()), "{text}");
    }
}

#[test]
fn damaged_text_is_refused_with_the_reason() {
    let cases = [
        (SHA256.replace("-1:", "-2:"), PskError::Form),
        (SHA256.trim_end_matches(':').to_owned(), PskError::Form),
        (format!("{SHA256}:"), PskError::Form),
        (String::new(), PskError::Form),
        ("NVMeTLSkey-1:".to_owned(), PskError::Form),
        ("NVMeTLSkey-1:01:!!!!:".to_owned(), PskError::Form),
        (format!("NVMeTLSkey-1:01:{}:", "A".repeat(400)), PskError::Form),
        (SHA256.replace(":01:", ":03:"), PskError::Hash),
        (SHA256.replace(":01:", ":1x:"), PskError::Hash),
        (SHA256.replace(":01:", ":02:"), PskError::Length),
        (SHA384.replace(":02:", ":01:"), PskError::Length),
        ("NVMeTLSkey-1:00:AAAA:".to_owned(), PskError::Length),
        ("NVMeTLSkey-1:00::".to_owned(), PskError::Length),
        (SHA256.replace("VRLb", "VRLc"), PskError::Checksum),
    ];
    for (text, expected) in cases {
        assert_eq!(ConfiguredPsk::parse(text.as_bytes()).err(), Some(expected), "{text}");
    }
    ConfiguredPsk::parse(format!("{SHA256}\n").as_bytes()).expect("a line's end is no part of the key");
}

#[test]
fn neither_keys_nor_secrets_are_printed() {
    let psk = ConfiguredPsk::parse(SHA256.as_bytes()).expect("a key");
    let tls = psk.derive(Version::Names, HOST, SUBSYSTEM).expect("short names");
    let printed = format!("{psk:?} {tls:?}");
    assert!(printed.contains("SecretBytes(32)"), "{printed}");
    assert!(!printed.contains("05c6") && !printed.contains("VRLb"), "{printed}");
}

#[test]
fn names_that_give_no_identity_are_refused() {
    let psk = ConfiguredPsk::parse(SHA256.as_bytes()).expect("a key");
    let long = "n".repeat(223);
    assert_eq!(psk.derive(Version::Names, &long, &long).err(), Some(PskError::NamesTooLong));
    let longest = psk.derive(Version::Digest, &long, &long).expect("the context is the digest");
    assert!(longest.identity.len() < 512);
    // 255 bytes of an identity of version 0: "NVMe0R01", two spaces, and the names.
    let [first, second] = ["n".repeat(200), "n".repeat(45)];
    psk.derive(Version::Names, &first, &second).expect("the longest names");
    assert_eq!(psk.derive(Version::Names, &first, &"n".repeat(46)).err(), Some(PskError::NamesTooLong));
    assert_eq!(psk.derive(Version::Digest, "a b", "c").err(), Some(PskError::NameWithSpace));
    assert_eq!(psk.derive(Version::Digest, "a", "b c").err(), Some(PskError::NameWithSpace));
}

#[test]
fn each_host_and_each_subsystem_has_its_own_secret() {
    let psk = ConfiguredPsk::parse(SHA256.as_bytes()).expect("a key");
    for version in Version::ALL {
        let secret =
            |host, subsystem| hex(&psk.derive(version, host, subsystem).expect("short names").secret);
        let secrets = [secret("a", "b"), secret("b", "a"), secret("a", "c"), secret("c", "b")];
        for (index, secret) in secrets.iter().enumerate() {
            assert!(!secrets[..index].contains(secret));
        }
    }
}
