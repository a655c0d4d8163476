//! The vectors of IEEE 1619-2007, annex B, whose data is whole blocks: 2 to 14 and 19. Vector 1 has equal halves, which are no
//! key here; 15 to 18 have ciphertext stealing.

use super::*;

/// A key of AES-128, whose data each of the vectors 4 to 9 encrypts.
const E_PI: &str = "2718281828459045235360287471352631415926535897932384626433832795";
/// The key of the vectors 10 to 14.
const E_PI_256: &str = "2718281828459045235360287471352662497757247093699959574966967627\
    3141592653589793238462643383279502884197169399375105820974944592";
const VECTOR_19: &str = "e0e1e2e3e4e5e6e7e8e9eaebecedeeefc0c1c2c3c4c5c6c7c8c9cacbcccdcecf";

/// A ciphertext of 512 bytes: its first and last block as in the standard, and the SHA-256 of all of it.
struct Cipher(&'static str, &'static str, &'static str);

/// The vectors 4 to 9: these data units of a sequence from 0 on, each of which encrypts the ciphertext of the one before.
const CHAIN: [(u128, Cipher); 6] = [
    (
        0x0,
        Cipher(
            "27a7479befa1d476489f308cd4cfa6e2",
            "0a282df920147beabe421ee5319d0568",
            "ebee4d64dd2395bb2d6a2d37a0a48ecb2bf4913cfc99d27c2214f2f4144715ea",
        ),
    ),
    (
        0x1,
        Cipher(
            "264d3ca8512194fec312c8c9891f279f",
            "fd2a89ccb45e001a03a867b187f225dd",
            "bed1b9d9bf8ce83a2ae1981fbd5f2b0c40e21bba5d57df2ea16ecd0975f25215",
        ),
    ),
    (
        0x2,
        Cipher(
            "fa762a3680b76007928ed4a4f49a9456",
            "4bcf518138dc3a25c5e236171a2d01d6",
            "68f1e84faa401c9914a7fd6fc565eaa7b531cedbc22bd28269aa58b15ceec03f",
        ),
    ),
    (
        0xfd,
        Cipher(
            "d55f684f81f4426e9fde92a5ff02df2a",
            "1d1c0a6783e011fc536d63d053260637",
            "e79164ec75ee2be22b85c9abec46d919916e0dae311ac7777ac37adc94abf2b5",
        ),
    ),
    (
        0xfe,
        Cipher(
            "72efc1ebfe1ee25975a6eb3aa8589dda",
            "883accdbe1104eef0cfdb54e12fb230a",
            "21c28d54ece4f4696129f67e2e0f8a1a6f452fd6609cc9eeb3d3b56ca8ce6269",
        ),
    ),
    (
        0xff,
        Cipher(
            "3260ae8dad1f4a32c5cafe3ab0eb9554",
            "c8a8679ccb84c26555440ec7f10445cd",
            "f4e8fa6b2cbf859268ce071a3f557dd1130e24748fe82d6c2ff34f0c5d52f57b",
        ),
    ),
];

/// The vectors 10 to 14 and 19, by key and data unit.
const SINGLE: [(&str, u128, Cipher); 6] = [
    (
        E_PI_256,
        0xff,
        Cipher(
            "1c3b3a102f770386e4836c99e370cf9b",
            "c4f36ffda9fcea70b9c6e693e148c151",
            "e97e974fa393af794f7a4684395814cf820de60a01eaec677d87b452e316b364",
        ),
    ),
    (
        E_PI_256,
        0xffff,
        Cipher(
            "77a31251618a15e6b92d1d66dffe7b50",
            "a4f9e27b42af8100cb9d59cef9645803",
            "def4fad29e95dfe1a24b1ad4620f86d7be094cced5b19e0b121aa82d9e6baf98",
        ),
    ),
    (
        E_PI_256,
        0xffffff,
        Cipher(
            "e387aaa58ba483afa7e8eb469778317e",
            "2263a1eef52dd6888c309f5a7d712826",
            "8bf44861a081dd660d91ce615b5cdfb4d5df9d72c3025c12e67cc0ae097fa5d5",
        ),
    ),
    (
        E_PI_256,
        0xffff_ffff,
        Cipher(
            "bf53d2dade78e822a4d949a9bc6766b0",
            "4c82f335abb152c4a93411373aaa8220",
            "c706140a11affda7402234f5e6331eacbfeb687d8e80d83962691823bb3636f0",
        ),
    ),
    (
        E_PI_256,
        0xff_ffff_ffff,
        Cipher(
            "64497e5a831e4a932c09be3e5393376d",
            "d609d273ad5b0d59631c531f6a0a57b9",
            "afba71abc4e95b186d89a63a5437c1bafcfd1a18ca273970c534aba4f8d05282",
        ),
    ),
    (
        VECTOR_19,
        0xa9_8765_4321,
        Cipher(
            "38b45812ef43a05bd957e545907e223b",
            "8a6b18e86de60290fa72b797b0ce59f3",
            "36e32e6ec26a4e2a05993f91af535f405e0317863a14aea7c0cfbdafed6442ca",
        ),
    ),
];

fn sha256(data: &[u8]) -> Vec<u8> {
    let mut digest = vec![0; 32];
    // SAFETY: the digest has 32 bytes.
    unsafe { aws::SHA256(data.as_ptr(), data.len(), digest.as_mut_ptr()) };
    digest
}

fn encrypted(key: &Key, start: u128, plain: &[u8]) -> Vec<u8> {
    let (size, tweaks) = (sector(plain.len()), Tweaks { start, step: 1 });
    let mut data = plain.to_vec();
    key.encrypt_in_place(size, tweaks, &mut data).unwrap();
    let cipher = data.clone();
    key.decrypt_in_place(size, tweaks, &mut data).unwrap();
    assert_eq!(data, plain);
    cipher
}

fn check_cipher(cipher: &[u8], Cipher(first, last, digest): &Cipher, unit: u128) {
    assert_eq!((&cipher[..16], &cipher[496..]), (&*hex(first), &*hex(last)), "data unit {unit:x}");
    assert_eq!(sha256(cipher), hex(digest), "data unit {unit:x}");
}

pub fn check(implementation: Implementation) {
    let key = |digits: &str| key(&hex(digits), implementation);
    let twos = "22".repeat(16);
    for (first, cipher) in
        [("11".repeat(16), VECTOR_2), ("fffefdfcfbfaf9f8f7f6f5f4f3f2f1f0".to_owned(), VECTOR_3)]
    {
        let Some(key) = key(&(first + &twos)) else { return };
        assert_eq!(encrypted(&key, 0x33_3333_3333, &[0x44; 32]), hex(cipher));
    }
    let counted: Vec<u8> = (0..512).map(|i| i as u8).collect();
    let chained = key(E_PI).unwrap();
    let mut data = counted.clone();
    let mut expected = CHAIN.iter().peekable();
    for unit in 0..=0xff {
        data = encrypted(&chained, unit, &data);
        if let Some((_, cipher)) = expected.next_if(|(known, _)| *known == unit) {
            check_cipher(&data, cipher, unit);
        }
    }
    assert!(expected.next().is_none());
    for (digits, unit, cipher) in &SINGLE {
        check_cipher(&encrypted(&key(digits).unwrap(), *unit, &counted), cipher, *unit);
    }
}

const VECTOR_2: &str = "c454185e6a16936e39334038acef838bfb186fff7480adc4289382ecd6d394f0";
const VECTOR_3: &str = "af85336b597afc1a900b2eb21ec949d292df4c047e0b21532186a5971a227a89";
