//! AES-256-XTS of ISA-L_crypto, which SPDK uses. No distribution that the project is tested on packages it, so it is measured
//! where its library is found: by the loader, or at the path in `ARYK_ISAL_CRYPTO`.
#![expect(unsafe_code, reason = "a library in C is measured")]

use super::cipher::{Cipher, KEY};
use anyhow::{Context as _, Result, ensure};
use libloading::Library;
use std::ffi::c_int;

/// The file of version 2.
const FILE: &str = "libisal_crypto.so.2";
/// The variable with the path of another file.
const VARIABLE: &str = "ARYK_ISAL_CRYPTO";
/// Bytes of the round keys of AES-256.
const SCHEDULE: usize = 15 * 16;

/// `isal_aes_keyexp_256`: the key, then the round keys for encryption and for decryption.
type Expand = unsafe extern "C" fn(*const u8, *mut u8, *mut u8) -> c_int;
/// `isal_aes_xts_enc_256_expanded_key`: the round keys of the tweak and of the data, the tweak, and a sector.
type Crypt = unsafe extern "C" fn(
    *const u8,
    *const u8,
    *const u8,
    u64,
    *const std::ffi::c_void,
    *mut std::ffi::c_void,
) -> c_int;

/// The library, with the round keys of [`KEY`].
pub struct Isal {
    /// For decryption and for encryption.
    functions: [Crypt; 2],
    /// Of the data, for decryption and for encryption.
    schedules: [[u8; SCHEDULE]; 2],
    tweak: [u8; SCHEDULE],
    _library: Library,
}

impl Isal {
    /// The library; `None` if this computer does not have it.
    ///
    /// # Errors
    /// The variable names a file that is not the library, or the library lacks functions of version 2.25.
    pub fn find() -> Result<Option<Self>> {
        let path = std::env::var_os(VARIABLE);
        // SAFETY: the library's initialization has no conditions.
        let library = match (unsafe { Library::new(path.as_deref().unwrap_or(FILE.as_ref())) }, path) {
            (Ok(library), _) => library,
            (Err(_), None) => return Ok(None),
            (Err(error), Some(path)) => {
                return Err(error).with_context(|| format!("{VARIABLE}={}", path.display()));
            }
        };
        // SAFETY: these are the functions' types since version 2.25.
        let (expand, functions) = unsafe {
            let expand: Expand = *library.get(b"isal_aes_keyexp_256")?;
            let decrypt: Crypt = *library.get(b"isal_aes_xts_dec_256_expanded_key")?;
            (expand, [decrypt, *library.get(b"isal_aes_xts_enc_256_expanded_key")?])
        };
        let (mut decrypt, mut encrypt, mut tweak, mut unused) =
            ([0; SCHEDULE], [0; SCHEDULE], [0; SCHEDULE], [0; SCHEDULE]);
        // SAFETY: each half of the key has 32 bytes, and each schedule its size.
        let done = unsafe {
            [
                expand(KEY.as_ptr(), encrypt.as_mut_ptr(), decrypt.as_mut_ptr()),
                expand(KEY[32..].as_ptr(), tweak.as_mut_ptr(), unused.as_mut_ptr()),
            ]
        };
        ensure!(done == [0, 0], "ISA-L_crypto refuses the key");
        Ok(Some(Self { functions, schedules: [decrypt, encrypt], tweak, _library: library }))
    }
}

impl Cipher for Isal {
    fn name(&self) -> &'static str {
        "ISA-L_crypto"
    }

    #[inline]
    fn run(&mut self, encrypt: bool, sector: usize, tweak: u64, src: &[u8], dst: &mut [u8]) -> Result<()> {
        let direction = usize::from(encrypt);
        let (crypt, schedule) = (self.functions[direction], &self.schedules[direction]);
        for ((tweak, src), dst) in (tweak..).zip(src.chunks_exact(sector)).zip(dst.chunks_exact_mut(sector)) {
            let tweak = u128::from(tweak).to_le_bytes();
            // SAFETY: the schedules have their sizes, the tweak has 16 bytes, and both buffers have those of the sector.
            let done = unsafe {
                let (from, to) = (src.as_ptr().cast(), dst.as_mut_ptr().cast());
                crypt(self.tweak.as_ptr(), schedule.as_ptr(), tweak.as_ptr(), sector as u64, from, to)
            };
            ensure!(done == 0, "ISA-L_crypto fails: {done}");
        }
        Ok(())
    }
}
