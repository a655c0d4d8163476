//! AES-256-XTS alone: `aryk-aes-xts` compared with AWS-LC, OpenSSL and, where it is installed, ISA-L_crypto, in turns on one
//! core.
//!
//! AWS-LC and OpenSSL get a context for each direction, made once, and one call for the tweak and one for the data of each
//! sector; ISA-L_crypto gets expanded keys, and one call for each sector: the least that their interfaces allow.
#![expect(unsafe_code, reason = "libraries in C are measured")]

use super::isal::Isal;
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::settings::Settings;
use anyhow::{Context as _, Result, ensure};
use aryk_aes_xts::{Key, SectorSize, Tweaks};
use libloading::Library;
use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::ptr;
use std::time::{Duration, Instant};

/// The file of OpenSSL 3.
const OPENSSL: &str = "libcrypto.so.3";
/// A key, whose halves differ.
pub const KEY: [u8; 64] = {
    let mut key = [0; 64];
    let mut i = 0;
    while i < key.len() {
        key[i] = i as u8;
        i += 1;
    }
    key
};
/// Bytes of the source and of the destination, through which requests go: they stay in a core's cache.
const AREA: usize = 256 << 10;
/// Sizes of a sector and of a request, and how much faster than all libraries the project's code aims to be.
const CASES: [(usize, usize, f64); 5] = [
    (512, 512, 1.5),
    (512, 4 << 10, 1.5),
    (512, 128 << 10, 1.5),
    (4 << 10, 4 << 10, 1.0),
    (4 << 10, 128 << 10, 1.0),
];

const INTRO: &str = "GB/s of AES-256-XTS on one core, from one buffer to another, both of 256 KiB and in the core's cache. A request is \
    encrypted or decrypted by one call of `aryk-aes-xts`; AWS-LC and OpenSSL need two calls for each sector, one of them for the \
    tweak. The last column compares with the fastest library of the same round.";

/// What is said where ISA-L_crypto is missing.
const WITHOUT_ISAL: &str = " ISA-L_crypto, which SPDK uses, was not measured: Debian does not package it. Where `libisal_crypto.so.2` is \
    installed, it is one of the libraries; `ARYK_ISAL_CRYPTO` names a file in another place.";

/// An implementation that encrypts and decrypts sectors. Consecutive sectors have consecutive tweaks.
pub trait Cipher {
    /// For people.
    fn name(&self) -> &'static str;
    /// Encrypts or decrypts whole sectors.
    fn run(&mut self, encrypt: bool, sector: usize, tweak: u64, src: &[u8], dst: &mut [u8]) -> Result<()>;
}

impl Cipher for Key {
    fn name(&self) -> &'static str {
        "aryk-aes-xts"
    }

    #[inline]
    fn run(&mut self, encrypt: bool, sector: usize, tweak: u64, src: &[u8], dst: &mut [u8]) -> Result<()> {
        let (sector, tweaks) = (SectorSize::new(sector)?, Tweaks { start: u128::from(tweak), step: 1 });
        if encrypt {
            self.encrypt(sector, tweaks, src, dst)?;
        } else {
            self.decrypt(sector, tweaks, src, dst)?;
        }
        Ok(())
    }
}

/// `EVP_CIPHER_CTX_new`.
type New = unsafe extern "C" fn() -> *mut c_void;
/// `EVP_CIPHER_CTX_free`.
type Free = unsafe extern "C" fn(*mut c_void);
/// `EVP_aes_256_xts`.
type Aes256Xts = unsafe extern "C" fn() -> *const c_void;
/// `EVP_CipherInit_ex`.
type Init =
    unsafe extern "C" fn(*mut c_void, *const c_void, *mut c_void, *const u8, *const u8, c_int) -> c_int;
/// `EVP_CipherUpdate`.
type Update = unsafe extern "C" fn(*mut c_void, *mut u8, *mut c_int, *const u8, c_int) -> c_int;

/// The functions of a library that has the interface of OpenSSL.
struct Functions {
    new: New,
    free: Free,
    aes_256_xts: Aes256Xts,
    init: Init,
    update: Update,
}

/// A library that has the interface of OpenSSL, with a context for decryption and one for encryption.
struct Evp {
    name: &'static str,
    functions: Functions,
    contexts: [*mut c_void; 2],
    // Unloaded after the contexts are freed.
    _library: Option<Library>,
}

impl Evp {
    fn aws_lc() -> Result<Self> {
        use aws_lc_sys as aws;
        // SAFETY: the types differ only in the names of what pointers point to.
        let functions = unsafe {
            Functions {
                new: transmute::<*const (), New>(aws::EVP_CIPHER_CTX_new as *const ()),
                free: transmute::<*const (), Free>(aws::EVP_CIPHER_CTX_free as *const ()),
                aes_256_xts: transmute::<*const (), Aes256Xts>(aws::EVP_aes_256_xts as *const ()),
                init: transmute::<*const (), Init>(aws::EVP_CipherInit_ex as *const ()),
                update: transmute::<*const (), Update>(aws::EVP_CipherUpdate as *const ()),
            }
        };
        Self::new("AWS-LC", functions, None)
    }

    fn openssl() -> Result<Self> {
        // SAFETY: OpenSSL's initialization has no conditions.
        let library = unsafe { Library::new(OPENSSL) }.context("the Debian package is libssl3")?;
        // SAFETY: these are the functions' types in OpenSSL 3.
        let functions = unsafe {
            Functions {
                new: *library.get(b"EVP_CIPHER_CTX_new")?,
                free: *library.get(b"EVP_CIPHER_CTX_free")?,
                aes_256_xts: *library.get(b"EVP_aes_256_xts")?,
                init: *library.get(b"EVP_CipherInit_ex")?,
                update: *library.get(b"EVP_CipherUpdate")?,
            }
        };
        Self::new("OpenSSL", functions, Some(library))
    }

    fn new(name: &'static str, functions: Functions, library: Option<Library>) -> Result<Self> {
        // SAFETY: no argument.
        let contexts = [0, 1].map(|_| unsafe { (functions.new)() });
        let evp = Self { name, functions, contexts, _library: library };
        for (encrypt, &context) in (0..).zip(&evp.contexts) {
            ensure!(!context.is_null(), "{name} gives no context");
            // SAFETY: the context is new, the key has the cipher's 64 bytes, and a tweak comes with each sector.
            let done = unsafe {
                let cipher = (evp.functions.aes_256_xts)();
                (evp.functions.init)(context, cipher, ptr::null_mut(), KEY.as_ptr(), ptr::null(), encrypt)
            };
            ensure!(done == 1, "{name} refuses the key");
        }
        Ok(evp)
    }
}

impl Drop for Evp {
    fn drop(&mut self) {
        for &context in &self.contexts {
            // SAFETY: the context is of the same library, which takes null too.
            unsafe { (self.functions.free)(context) };
        }
    }
}

impl Cipher for Evp {
    fn name(&self) -> &'static str {
        self.name
    }

    #[inline]
    fn run(&mut self, encrypt: bool, sector: usize, tweak: u64, src: &[u8], dst: &mut [u8]) -> Result<()> {
        let context = self.contexts[usize::from(encrypt)];
        for ((tweak, src), dst) in (tweak..).zip(src.chunks_exact(sector)).zip(dst.chunks_exact_mut(sector)) {
            let (tweak, mut len) = (u128::from(tweak).to_le_bytes(), 0);
            // SAFETY: the context has its cipher and key, the tweak has 16 bytes, and both buffers have those of the sector.
            let done = unsafe {
                let none = (ptr::null(), ptr::null_mut(), ptr::null());
                [
                    (self.functions.init)(context, none.0, none.1, none.2, tweak.as_ptr(), -1),
                    (self.functions.update)(
                        context,
                        dst.as_mut_ptr(),
                        &raw mut len,
                        src.as_ptr(),
                        sector as c_int,
                    ),
                ]
            };
            ensure!(done == [1, 1] && len as usize == sector, "{} fails", self.name);
        }
        Ok(())
    }
}

/// Measures the selected cases.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let mut ciphers: Vec<Box<dyn Cipher>> =
        vec![Box::new(Key::new(&KEY)?), Box::new(Evp::aws_lc()?), Box::new(Evp::openssl()?)];
    let isal = Isal::find()?;
    let without = if isal.is_some() { "" } else { WITHOUT_ISAL };
    ciphers.extend(isal.map(|isal| Box::new(isal) as Box<dyn Cipher>));
    let names = ciphers.iter().map(|cipher| cipher.name().to_owned());
    let columns = ["case".to_owned()].into_iter().chain(names).chain(["ratio".to_owned()]).collect();
    let implementation = Key::new(&KEY)?.implementation();
    let intro = format!("{INTRO} This processor runs {implementation}.{without}");
    let mut section = Section::new("The cipher alone", &intro, columns);
    let span = settings.span / 10;
    for (sector, request, aim) in CASES {
        for (encrypt, direction) in [(true, "encrypt"), (false, "decrypt")] {
            let name = format!("cipher/{direction}/{sector}-in-{request}");
            if !settings.wants(&name) {
                continue;
            }
            let mut rates = vec![Runs::default(); ciphers.len()];
            for _ in 0..settings.runs {
                for (cipher, rates) in ciphers.iter_mut().zip(&mut rates) {
                    rates.push(rate(cipher.as_mut(), encrypt, sector, request, span)?);
                }
            }
            let best = rates[2..].iter().fold(rates[1].clone(), |best, other| best.greatest(other));
            let ratio = rates[0].over(&best);
            report.records.push(Record::new(&name, "peer the fastest library", "GB/s", &rates[0], &best));
            let case = format!("{direction} {request} bytes, sectors of {sector}");
            let cells = rates.iter().map(|runs| cell(runs, number));
            let ratio = format!("{} (aim {aim})", cell(&ratio, number));
            section.row([case].into_iter().chain(cells).chain([ratio]).collect());
        }
    }
    report.section(section);
    Ok(())
}

/// GB/s of requests through the area, each from its place in the source to the same place in the destination.
fn rate(
    cipher: &mut dyn Cipher,
    encrypt: bool,
    sector: usize,
    request: usize,
    span: Duration,
) -> Result<f64> {
    let (src, mut dst) = (vec![0x5a; AREA], vec![0; AREA]);
    let mut round = |cipher: &mut dyn Cipher| {
        let requests = src.chunks_exact(request).zip(dst.chunks_exact_mut(request));
        (0..)
            .zip(requests)
            .try_for_each(|(number, (src, dst))| cipher.run(encrypt, sector, number * 256, src, dst))
    };
    round(cipher)?;
    let (start, mut rounds) = (Instant::now(), 0);
    while start.elapsed() < span {
        round(cipher)?;
        rounds += 1;
    }
    Ok((rounds * AREA) as f64 / start.elapsed().as_secs_f64() / 1e9)
}

#[cfg(test)]
mod tests {
    use super::{CASES, Cipher, Evp, Isal, KEY};
    use aryk_aes_xts::Key;

    #[test]
    fn all_ciphers_make_the_same_bytes() {
        let mut ours = Key::new(&KEY).unwrap();
        let mut all: Vec<Box<dyn Cipher>> =
            vec![Box::new(Evp::aws_lc().unwrap()), Box::new(Evp::openssl().unwrap())];
        all.extend(Isal::find().unwrap().map(|isal| Box::new(isal) as Box<dyn Cipher>));
        for theirs in &mut all {
            for (sector, request, _) in CASES {
                let plain: Vec<u8> = (0..request).map(|i| (i * 7) as u8).collect();
                let (mut one, mut other) = (vec![0; request], vec![0; request]);
                ours.run(true, sector, 99, &plain, &mut one).unwrap();
                theirs.run(true, sector, 99, &plain, &mut other).unwrap();
                assert!(one == other && one != plain, "{}", theirs.name());
                theirs.run(false, sector, 99, &one, &mut other).unwrap();
                assert_eq!(other, plain, "{}", theirs.name());
            }
        }
    }
}
