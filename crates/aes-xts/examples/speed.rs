//! Measures AES-XTS beside AWS-LC: encryption from a buffer to another on one core, with sectors of 512 bytes and of 4 KiB. All
//! columns run in turn in each round, so that a slow phase of the host slows all of them.
//!
//! `cargo run --release -p aryk-aes-xts --example speed`
#![expect(clippy::disallowed_methods, reason = "a benchmark measures wall time")]

use aryk_aes_xts::{Implementation, Key, SectorSize, Tweaks};
use aws_lc_sys as aws;
use std::error::Error;
use std::ptr;
use std::time::Instant;

/// Bytes that one column encrypts in a round.
const ROUND_BYTES: usize = 8 << 20;
const ROUNDS: usize = 60;

/// AES-256-XTS of AWS-LC. Its context keeps the key; each sector gets a tweak.
struct AwsLc(*mut aws::EVP_CIPHER_CTX);

impl AwsLc {
    fn new(key: &[u8; 64]) -> Self {
        // SAFETY: no argument.
        let context = unsafe { aws::EVP_CIPHER_CTX_new() };
        // SAFETY: the key has the length of this cipher.
        let result = unsafe {
            aws::EVP_EncryptInit_ex(
                context,
                aws::EVP_aes_256_xts(),
                ptr::null_mut(),
                key.as_ptr(),
                ptr::null(),
            )
        };
        assert_eq!(result, 1, "AWS-LC takes the key");
        Self(context)
    }

    fn encrypt(&self, sector: usize, tweaks: Tweaks, src: &[u8], dst: &mut [u8]) {
        let mut tweak = tweaks.start;
        for (src, dst) in src.chunks_exact(sector).zip(dst.chunks_exact_mut(sector)) {
            let mut len = 0;
            // SAFETY: the tweak has 16 bytes, and source and destination have the same length.
            let results = unsafe {
                [
                    aws::EVP_EncryptInit_ex(
                        self.0,
                        ptr::null(),
                        ptr::null_mut(),
                        ptr::null(),
                        tweak.to_le_bytes().as_ptr(),
                    ),
                    aws::EVP_EncryptUpdate(
                        self.0,
                        dst.as_mut_ptr(),
                        &raw mut len,
                        src.as_ptr(),
                        src.len() as i32,
                    ),
                ]
            };
            assert_eq!(results, [1; 2], "AWS-LC encrypts");
            tweak = tweak.wrapping_add(tweaks.step);
        }
    }
}

impl Drop for AwsLc {
    fn drop(&mut self) {
        // SAFETY: it was created by `EVP_CIPHER_CTX_new`.
        unsafe { aws::EVP_CIPHER_CTX_free(self.0) };
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let bytes: [u8; 64] = std::array::from_fn(|i| i as u8 * 37);
    let aws_lc = AwsLc::new(&bytes);
    let native = Implementation::ALL.into_iter().filter(|i| i.is_available() && *i != Implementation::AwsLc);
    let keys: Vec<_> = native.map(|i| Key::with(&bytes, i)).collect::<Result<_, _>>()?;
    println!("AES-256-XTS, encryption in GB/s on one core, best and median of {ROUNDS} rounds");
    for (sector, request) in [(512, 512), (512, 4096), (512, 65_536), (4096, 4096), (4096, 65_536)] {
        let src = vec![0x5a; request];
        let mut dst = vec![0; request];
        let size = SectorSize::new(sector)?;
        let mut rates = vec![Vec::new(); keys.len() + 1];
        for round in 0..ROUNDS {
            let requests = (0..ROUND_BYTES / request)
                .map(|i| Tweaks { start: (round + i * request / sector) as u128, step: 1 });
            let started = Instant::now();
            requests.clone().for_each(|tweaks| aws_lc.encrypt(sector, tweaks, &src, &mut dst));
            rates[0].push(ROUND_BYTES as f64 / started.elapsed().as_nanos() as f64);
            for (key, rates) in keys.iter().zip(&mut rates[1..]) {
                let started = Instant::now();
                for tweaks in requests.clone() {
                    key.encrypt(size, tweaks, &src, &mut dst)?;
                }
                rates.push(ROUND_BYTES as f64 / started.elapsed().as_nanos() as f64);
            }
        }
        println!("sectors of {sector} bytes, requests of {request} bytes:");
        let names = ["AWS-LC"].into_iter().chain(keys.iter().map(|key| key.implementation().name()));
        let median_aws = summary(&mut rates[0]).1;
        for (name, rates) in names.zip(&mut rates) {
            let (best, median) = summary(rates);
            println!("  {name:9} {best:6.2} {median:6.2}  {:5.2} × AWS-LC", median / median_aws);
        }
    }
    Ok(())
}

/// The best and the median of some rates.
fn summary(rates: &mut [f64]) -> (f64, f64) {
    rates.sort_by(f64::total_cmp);
    (rates[rates.len() - 1], rates[rates.len() / 2])
}
