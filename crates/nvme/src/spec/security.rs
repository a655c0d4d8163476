//! Whether a self-encrypting drive is locked: the Level 0 Discovery of TCG Storage, read by Security Receive (protocol 01h,
//! ComID 0001h). TCG Storage Architecture Core Specification, "Level 0 Discovery". Big endian, unlike NVMe.

/// Security protocol of Level 0 Discovery.
pub const PROTOCOL: u8 = 0x01;
/// ComID of Level 0 Discovery.
pub const COM_ID: u16 = 0x0001;

/// Bytes before the first feature descriptor.
const HEADER: usize = 48;
/// Feature code of the locking feature.
const LOCKING: u16 = 0x0002;

/// What the locking feature reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Locking {
    /// Locking is configured.
    pub is_enabled: bool,
    /// At least one range is locked: reads or writes there fail until the drive is unlocked.
    pub is_locked: bool,
}

/// The locking feature in a discovery response; `None` where the response has none.
pub fn locking(response: &[u8]) -> Option<Locking> {
    let announced = u32::from_be_bytes(*response.first_chunk::<4>()?) as usize;
    let mut features = response.get(HEADER..response.len().min(announced.saturating_add(4)))?;
    while let Some((&[high, low, _, len], rest)) = features.split_first_chunk::<4>() {
        let data = rest.get(..usize::from(len))?;
        if u16::from_be_bytes([high, low]) == LOCKING {
            let bits = *data.first()?;
            return Some(Locking { is_enabled: bits & 2 != 0, is_locked: bits & 4 != 0 });
        }
        features = &rest[data.len()..];
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_locking_feature_is_found_behind_others_and_within_the_response() {
        let mut response = vec![0; HEADER];
        response.extend([0, 1, 0x10, 2, 9, 9, 0, 2, 0x10, 4, 0b0111, 0, 0, 0]);
        response[3] = (response.len() - 4) as u8;
        assert_eq!(locking(&response), Some(Locking { is_enabled: true, is_locked: true }));
        let mut shorter = response.clone();
        shorter[3] -= 8;
        assert_eq!(locking(&shorter), None, "behind the announced length");
        assert_eq!(locking(&response[..60]), None, "cut");
        assert_eq!(locking(&[0xff; 512]), None);
        assert_eq!(locking(&[0; 512]), None);
        assert_eq!(locking(&[]), None);
    }
}
