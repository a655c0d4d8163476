//! A Connect command of a host: the entry and its data, of any content.
//!
//! For any input, no code panics; what is accepted is written as it was read.
#![no_main]

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme_fabrics::command::Command;
use aryk_nvme_fabrics::connect::{ConnectData, InvalidParameter, LEN, Refusal};
use aryk_nvme_fabrics::sgl::{DataBlocks, Sgl};
use libfuzzer_sys::fuzz_target;
use zerocopy::FromBytes;

fuzz_target!(|input: &[u8]| {
    let Some((entry, data)) = input.split_first_chunk::<64>() else { return };
    let entry = SubmissionEntry::read_from_bytes(entry).expect("64 bytes");
    if let Ok(command) = Command::decode(&entry) {
        assert_eq!(Command::decode(&command.encode()), Ok(command));
    }
    for blocks in [DataBlocks::Transport, DataBlocks::Keyed] {
        if let Ok(sgl) = Sgl::decode(&entry, blocks)
            && sgl.check(data.len() as u32, 8192).is_ok()
        {
            assert!(sgl.len() <= 8192);
        }
    }
    // Names in the input follow each other; the data has them in fields.
    let mut fields = [0; LEN];
    let mut names = data.get(18..).unwrap_or_default().splitn(2, |byte| *byte == 0);
    let head = data.len().min(18);
    fields[..head].copy_from_slice(&data[..head]);
    for (at, name) in [256, 512].into_iter().zip(&mut names) {
        let len = name.len().min(256);
        fields[at..at + len].copy_from_slice(&name[..len]);
    }
    match ConnectData::decode(&fields) {
        Ok(connect) => {
            assert_eq!(ConnectData::decode(&connect.encode()), Ok(connect.clone()));
            assert!(connect.host_id != [0; 16] && connect.subsystem.as_str().len() <= 223);
        }
        Err(Refusal::Parameter(InvalidParameter::Data(offset))) => assert!([0, 256, 512].contains(&offset)),
        Err(other) => panic!("{other:?}"),
    }
    if data.len() < LEN {
        assert!(ConnectData::decode(data).is_err());
    }
});
