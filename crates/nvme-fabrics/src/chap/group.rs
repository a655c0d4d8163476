//! Diffie-Hellman groups. RFC 7919; NVMe 2.0 §8.13.5.3. Context: one that may compute for milliseconds.
//!
//! The prime of a group of `b` bits is FFh × 8, then the first `b` - 128 bits of the number e plus a small offset, then FFh × 8.
//! The generator is 2. Values are big endian, and as long as the prime.

use super::Failure;
use aryk_secrets::SecretBytes;
use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Odd};
use zeroize::Zeroizing;

/// A group, by its identifier on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Group {
    /// No group: nothing but the challenge varies.
    Null = 0,
    /// FFDHE 2048.
    Ffdhe2048 = 1,
    /// FFDHE 3072.
    Ffdhe3072 = 2,
    /// FFDHE 4096.
    Ffdhe4096 = 3,
    /// FFDHE 6144.
    Ffdhe6144 = 4,
    /// FFDHE 8192.
    Ffdhe8192 = 5,
}

/// Bytes of ones at both ends of a prime.
const ENDS: usize = 8;

impl Group {
    /// All groups, in the order in which a controller chooses.
    pub const ALL: [Self; 6] =
        [Self::Ffdhe3072, Self::Ffdhe2048, Self::Ffdhe4096, Self::Ffdhe6144, Self::Ffdhe8192, Self::Null];

    /// Its name, as in SPDK's options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Ffdhe2048 => "ffdhe2048",
            Self::Ffdhe3072 => "ffdhe3072",
            Self::Ffdhe4096 => "ffdhe4096",
            Self::Ffdhe6144 => "ffdhe6144",
            Self::Ffdhe8192 => "ffdhe8192",
        }
    }

    /// The group with this identifier.
    pub(super) fn with_id(id: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|group| *group as u8 == id)
    }

    /// Bytes of a value.
    pub const fn value_len(self) -> usize {
        match self {
            Self::Null => 0,
            Self::Ffdhe2048 => 256,
            Self::Ffdhe3072 => 384,
            Self::Ffdhe4096 => 512,
            Self::Ffdhe6144 => 768,
            Self::Ffdhe8192 => 1024,
        }
    }

    /// The offset that makes the prime one.
    const fn offset(self) -> u32 {
        match self {
            Self::Null => 0,
            Self::Ffdhe2048 => 560_316,
            Self::Ffdhe3072 => 2_625_351,
            Self::Ffdhe4096 => 5_736_041,
            Self::Ffdhe6144 => 15_705_020,
            Self::Ffdhe8192 => 10_965_728,
        }
    }

    /// Bits of a private value: twice the strength of the group, which RFC 7919 §5.2 allows.
    const fn private_bits(self) -> u32 {
        match self {
            Self::Null => 0,
            Self::Ffdhe2048 => 225,
            Self::Ffdhe3072 => 275,
            Self::Ffdhe4096 => 325,
            Self::Ffdhe6144 => 375,
            Self::Ffdhe8192 => 400,
        }
    }

    fn prime(self) -> Vec<u8> {
        let mut prime = vec![0xff; self.value_len()];
        let middle = &mut prime[ENDS..self.value_len() - ENDS];
        let digits = E.iter().flat_map(|line| line.as_bytes().chunks(2));
        for (byte, digits) in middle.iter_mut().zip(digits) {
            let digits = std::str::from_utf8(digits).expect("hexadecimal digits");
            *byte = u8::from_str_radix(digits, 16).expect("hexadecimal digits");
        }
        // The ones at the end are those of the last borrow.
        let mut carry = u64::from(self.offset() - 1);
        for byte in middle.iter_mut().rev() {
            carry += u64::from(*byte);
            *byte = carry as u8;
            carry >>= 8;
        }
        prime
    }
}

/// The private value of one side.
pub(super) struct Private {
    group: Group,
    params: BoxedMontyParams,
    value: Zeroizing<BoxedUint>,
}

impl std::fmt::Debug for Private {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Private({:?})", self.group)
    }
}

impl Private {
    /// A random value. `None` without a group.
    pub fn random(group: Group) -> Option<Self> {
        let random = Zeroizing::new(super::random::<50>());
        Self::with(group, &random)
    }

    /// The value in `bytes`, of which the highest bits are ignored.
    pub(super) fn with(group: Group, bytes: &[u8; 50]) -> Option<Self> {
        if group == Group::Null {
            return None;
        }
        let precision = 8 * group.value_len() as u32;
        let prime = BoxedUint::from_be_slice(&group.prime(), precision).expect("its own length");
        let params = BoxedMontyParams::new_vartime(Odd::new(prime).expect("a prime is odd"));
        let value = BoxedUint::from_be_slice(bytes, 8 * bytes.len() as u32).expect("its own length");
        Some(Self { group, params, value: Zeroizing::new(value) })
    }

    /// `base` to the power of the private value.
    fn power(&self, base: BoxedUint) -> Zeroizing<Box<[u8]>> {
        let base = BoxedMontyForm::new(base, &self.params);
        let power = base.pow_bounded_exp(&self.value, self.group.private_bits());
        let power = Zeroizing::new(power.retrieve());
        Zeroizing::new(power.to_be_bytes())
    }

    fn number(&self, bytes: &[u8]) -> Result<BoxedUint, Failure> {
        BoxedUint::from_be_slice(bytes, 8 * self.group.value_len() as u32).map_err(|_| Failure::Payload)
    }

    /// The public value.
    pub fn public(&self) -> Vec<u8> {
        let two = self.number(&[2]).expect("it fits");
        self.power(two).to_vec()
    }

    /// The value that both sides share.
    ///
    /// # Errors
    /// The other side's public value is none: [`Failure::Payload`].
    pub fn agree(&self, public: &[u8]) -> Result<SecretBytes, Failure> {
        let number = self.number(public)?;
        let one = self.number(&[1])?;
        let last = self.params.modulus().as_ref().wrapping_sub(&one);
        // 0, 1 and -1 have powers that anyone can guess.
        if number <= one || number >= last {
            return Err(Failure::Payload);
        }
        Ok(SecretBytes::copy_of(&self.power(number)))
    }
}

/// The number e in binary: 2 digits before the point, and 8062 behind it.
const E: [&str; 18] = [
    "adf85458a2bb4a9aafdc5620273d3cf1d8b9c583ce2d3695a9e13641146433fbcc939dce249b3ef97d2fe363630c75d8f681b202aec4617a",
    "d3df1ed5d5fd65612433f51f5f066ed0856365553ded1af3b557135e7f57c935984f0c70e0e68b77e2a689daf3efe8721df158a136ade735",
    "30acca4f483a797abc0ab182b324fb61d108a94bb2c8e3fbb96adab760d7f4681d4f42a3de394df4ae56ede76372bb190b07a7c8ee0a6d70",
    "9e02fce1cdf7e2ecc03404cd28342f619172fe9ce98583ff8e4f1232eef28183c3fe3b1b4c6fad733bb5fcbc2ec22005c58ef1837d1683b2",
    "c6f34a26c1b2effa886b4238611fcfdcde355b3b6519035bbc34f4def99c023861b46fc9d6e6c9077ad91d2691f7f7ee598cb0fac186d91c",
    "aefe130985139270b4130c93bc437944f4fd4452e2d74dd364f2e21e71f54bff5cae82ab9c9df69ee86d2bc522363a0dabc521979b0deada",
    "1dbf9a42d5c4484e0abcd06bfa53ddef3c1b20ee3fd59d7c25e41d2b669e1ef16e6f52c3164df4fb7930e9e4e58857b6ac7d5f42d69f6d18",
    "7763cf1d5503400487f55ba57e31cc7a7135c886efb4318aed6a1e012d9e6832a907600a918130c46dc778f971ad0038092999a333cb8b7a",
    "1a1db93d7140003c2a4ecea9f98d0acc0a8291cdcec97dcf8ec9b55a7f88a46b4db5a851f44182e1c68a007e5e0dd9020bfd64b645036c7a",
    "4e677d2c38532a3a23ba4442caf53ea63bb454329b7624c8917bdd64b1c0fd4cb38e8c334c701c3acdad0657fccfec719b1f5c3e4e46041f",
    "388147fb4cfdb477a52471f7a9a96910b855322edb6340d8a00ef092350511e30abec1fff9e3a26e7fb29f8c183023c3587e38da0077d9b4",
    "763e4e4b94b2bbc194c6651e77caf992eeaac0232a281bf6b3a739c1226116820ae8db5847a67cbef9c9091b462d538cd72b03746ae77f5e",
    "62292c311562a846505dc82db854338ae49f5235c95b91178ccf2dd5cacef403ec9d1810c6272b045b3b71f9dc6b80d63fdd4a8e9adb1e69",
    "62a69526d43161c1a41d570d7938dad4a40e329ccff46aaa36ad004cf600c8381e425a31d951ae64fdb23fcec9509d43687feb69edd1cc5e",
    "0b8cc3bdf64b10ef86b63142a3ab8829555b2f747c932665cb2c0f1cc01bd70229388839d2af05e454504ac78b7582822846c0ba35c35f5c",
    "59160cc046fd8251541fc68c9c86b022bb7099876a460e7451a8a93109703fee1c217e6c3826e52c51aa691e0e423cfc99e9e31650c1217b",
    "624816cdad9a95f9d5b8019488d9c0a0a1fe3075a577e23183f81d4a3f2fa4571efc8ce0ba8a4fe8b6855dfe72b0a66eded2fbabfbe58a30",
    "fafabe1c5d71a87e2f741ef8c1fe86fea6bbfde530677f0d97d11d49f7a8443d0822e506a9f4614e011e2a94838ff88cd68c8bb7c51eef6d",
];
