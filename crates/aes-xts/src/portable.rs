//! XTS over the block cipher of AWS-LC, for processors without AES instructions. Any context.
//!
//! AWS-LC has no AES-128-XTS, and its AES-256-XTS needs a context of its own for each call; its block cipher needs neither.

use crate::{BLOCK, Direction, Job};
use aryk_secrets::SecretBox;
use aws_lc_sys::{AES_KEY, AES_decrypt, AES_encrypt, AES_set_decrypt_key, AES_set_encrypt_key};

/// The expanded keys.
pub(crate) struct Schedule {
    encrypt: AES_KEY,
    decrypt: AES_KEY,
    tweak: AES_KEY,
}

impl Schedule {
    /// Expands keys of 16 or 32 bytes.
    pub(crate) fn new(data: &[u8], tweak: &[u8]) -> SecretBox<Self> {
        let empty = AES_KEY { rd_key: [0; 60], rounds: 0 };
        let mut schedule = SecretBox::new(Self { encrypt: empty, decrypt: empty, tweak: empty });
        let bits = |key: &[u8]| key.len() as u32 * 8;
        let Self { encrypt, decrypt, tweak: of_tweak } = &mut *schedule;
        // SAFETY: the key has as many bits, and the schedule is writable.
        let results = unsafe {
            [
                AES_set_encrypt_key(data.as_ptr(), bits(data), encrypt),
                AES_set_decrypt_key(data.as_ptr(), bits(data), decrypt),
                AES_set_encrypt_key(tweak.as_ptr(), bits(tweak), of_tweak),
            ]
        };
        assert_eq!(results, [0; 3], "AWS-LC takes keys of 128 and of 256 bits");
        schedule
    }

    /// Encrypts or decrypts the sectors of a job.
    ///
    /// # Safety
    /// The job's bytes are readable from its `src` on and writable from its `dst` on.
    pub(crate) unsafe fn crypt(&self, direction: Direction, job: &Job) {
        let mut at = 0;
        for sector in 0..job.sectors {
            let mut tweak = job.tweaks.skip(sector).start.to_le_bytes();
            // SAFETY: AWS-LC allows the output to be the input; the key is a schedule of AWS-LC.
            unsafe { AES_encrypt(tweak.as_ptr(), tweak.as_mut_ptr(), &raw const self.tweak) };
            let mut tweak = u128::from_le_bytes(tweak);
            for _ in 0..job.blocks {
                // SAFETY: the caller's promise: the job has `sectors` times `blocks` blocks.
                let block = unsafe { job.src.add(at).cast::<[u8; BLOCK]>().read_volatile() };
                let block = self.crypt_block(direction, block, tweak);
                // SAFETY: as above.
                unsafe { job.dst.add(at).cast::<[u8; BLOCK]>().write(block) };
                tweak = (tweak << 1) ^ ((tweak >> 127) * 0x87);
                at += BLOCK;
            }
        }
    }

    fn crypt_block(&self, direction: Direction, block: [u8; BLOCK], tweak: u128) -> [u8; BLOCK] {
        let mut block = (u128::from_le_bytes(block) ^ tweak).to_le_bytes();
        let (from, to) = (block.as_ptr(), block.as_mut_ptr());
        match direction {
            // SAFETY: AWS-LC allows the output to be the input; the key is a schedule of AWS-LC for this direction.
            Direction::Encrypt => unsafe { AES_encrypt(from, to, &raw const self.encrypt) },
            // SAFETY: as above.
            Direction::Decrypt => unsafe { AES_decrypt(from, to, &raw const self.decrypt) },
        }
        (u128::from_le_bytes(block) ^ tweak).to_le_bytes()
    }
}

#[cfg(test)]
impl Schedule {
    pub(crate) fn words(&self) -> Vec<u32> {
        [self.encrypt.rd_key, self.decrypt.rd_key, self.tweak.rd_key].concat()
    }
}
