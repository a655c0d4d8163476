//! Integers of variable length, and lists of bytes: the encoding of manifests. Any context.

use crate::OpenError;

/// Appends values to bytes.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    pub(crate) bytes: Vec<u8>,
}

impl Writer {
    /// Seven bits per byte, the least significant first.
    pub(crate) fn int(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }

    pub(crate) fn signed(&mut self, value: i64) {
        self.int((value << 1 ^ value >> 63) as u64);
    }

    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.int(text.len() as u64);
        self.raw(text.as_bytes());
    }
}

/// Takes values from the front of bytes.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
}

const CUT_OFF: OpenError = OpenError::Damaged("a record is cut off");

impl<'a> Reader<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// The bytes that are left.
    pub(crate) const fn rest(&self) -> &'a [u8] {
        self.bytes
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn int(&mut self) -> Result<u64, OpenError> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.bytes.split_first().ok_or(CUT_OFF)?;
            self.bytes = rest;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            value |= bits << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(OpenError::Damaged("a number is too long"))
    }

    /// A number that fits a smaller type.
    pub(crate) fn small<T: TryFrom<u64>>(&mut self) -> Result<T, OpenError> {
        T::try_from(self.int()?).map_err(|_| OpenError::Damaged("a number is too large"))
    }

    pub(crate) fn signed(&mut self) -> Result<i64, OpenError> {
        let value = self.int()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    pub(crate) fn raw(&mut self, len: usize) -> Result<&'a [u8], OpenError> {
        let (bytes, rest) = self.bytes.split_at_checked(len).ok_or(CUT_OFF)?;
        self.bytes = rest;
        Ok(bytes)
    }

    pub(crate) fn text(&mut self) -> Result<String, OpenError> {
        let len = self.small()?;
        String::from_utf8(self.raw(len)?.to_vec()).map_err(|_| OpenError::Damaged("a name is not UTF-8"))
    }

    /// The number of items of a list, each of which has at least one byte.
    pub(crate) fn count(&mut self) -> Result<usize, OpenError> {
        let count = self.small()?;
        if count > self.bytes.len() { Err(CUT_OFF) } else { Ok(count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_read_as_they_were_written() {
        let values = [0, 1, 127, 128, 300, u64::from(u32::MAX), u64::MAX];
        let mut writer = Writer::default();
        for value in values {
            writer.int(value);
            writer.signed(value as i64);
        }
        let mut reader = Reader::new(&writer.bytes);
        for value in values {
            assert_eq!((reader.int(), reader.signed()), (Ok(value), Ok(value as i64)));
        }
        assert!(reader.is_empty() && reader.int().is_err());
    }

    #[test]
    fn a_number_of_more_than_64_bits_is_refused() {
        assert!(Reader::new(&[0xff; 10]).int().is_err());
        let most = [&[0xff; 9][..], &[1]].concat();
        assert_eq!(Reader::new(&most).int(), Ok(u64::MAX));
        let more = [&[0xff; 9][..], &[2]].concat();
        assert!(Reader::new(&more).int().is_err());
    }
}
