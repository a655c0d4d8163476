//! Headers and data exchanged with cryptsetup and with qemu-img, in files: no device mapper is needed.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::io::Write;
use std::num::NonZeroU32;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use aryk_aes_xts::{Key, SectorSize, Tweaks};
use aryk_luks::{Argon2Variant, Cipher, Error, Hash, Header, Kdf, Limits, Options, Segment, Version, format};

/// QEMU requires UTF-8 without zeroes.
const SECRET: &[u8] = "correct\nhörse".as_bytes();
const OTHER: &[u8] = b"\xff\0battery staple";
/// Larger than any header here, and the data behind it.
const FILE_LEN: u64 = 20 << 20;

/// A directory with one volume.
struct Volume {
    directory: tempfile::TempDir,
}

impl Volume {
    fn new() -> Self {
        let volume = Self { directory: tempfile::tempdir().unwrap() };
        File::create(volume.path("volume")).unwrap().set_len(FILE_LEN).unwrap();
        volume
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn file(&self) -> File {
        File::options().read(true).write(true).open(self.path("volume")).unwrap()
    }

    fn header(&self) -> Header {
        Header::read(&mut self.file(), &Limits::default()).unwrap()
    }

    /// The volume key that `secret` opens.
    fn key(&self, secret: &[u8]) -> Vec<u8> {
        let unlocked = self.header().unlock(&mut self.file(), secret, None, &Limits::default());
        unlocked.unwrap_or_else(|error| panic!("{error}")).key.as_bytes().to_vec()
    }

    /// Runs cryptsetup on the volume with `secret` as its key file.
    fn cryptsetup(&self, action: &str, secret: &[u8], options: &[&str]) -> Output {
        let mut command = Command::new("cryptsetup");
        command.args(["--batch-mode", "--key-file", "-", action]).arg(self.path("volume")).args(options);
        run(command, secret)
    }

    fn cryptsetup_opens(&self, secret: &[u8]) -> bool {
        self.cryptsetup("open", secret, &["--test-passphrase"]).status.success()
    }

    /// The volume key that cryptsetup reads.
    fn cryptsetup_key(&self, secret: &[u8]) -> Vec<u8> {
        let path = self.path("key");
        let options = ["--dump-volume-key", "--volume-key-file", path.to_str().unwrap()];
        assert_success(&self.cryptsetup("luksDump", secret, &options));
        let key = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        key
    }

    fn format(&self, version: Version, kdf: Kdf, sector_size: u32) -> Vec<u8> {
        let cipher = if sector_size == 1024 { Cipher::Aes128Xts } else { Cipher::Aes256Xts };
        let options = Options { version, cipher, sector_size, kdf, label: String::new(), uuid: None };
        let (_, key) = format(&mut self.file(), &options, SECRET).unwrap();
        key.as_bytes().to_vec()
    }
}

fn run(mut command: Command, input: &[u8]) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    // A program that ends early does not read everything.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

fn assert_success(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn pbkdf2(hash: Hash) -> Kdf {
    Kdf::Pbkdf2 { hash, iterations: NonZeroU32::new(1000).unwrap() }
}

const ARGON2ID: Kdf = Kdf::Argon2 { variant: Argon2Variant::Id, passes: 4, memory_kib: 256, lanes: 3 };

/// Encrypts or decrypts the data of a segment from its start.
fn crypt(segment: &Segment, key: &[u8], data: &mut [u8], decrypt: bool) {
    let size = SectorSize::new(segment.sector_size as usize).unwrap();
    let second = segment.tweak_at(segment.sector_size.into());
    let tweaks = Tweaks { start: segment.iv_tweak.into(), step: (second - segment.iv_tweak).into() };
    let key = Key::new(key).unwrap();
    let result = match decrypt {
        true => key.decrypt_in_place(size, tweaks, data),
        false => key.encrypt_in_place(size, tweaks, data),
    };
    result.unwrap();
}

fn random_data(len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(7);
    (0..len).map(|_| random.u8(..)).collect()
}

#[test]
fn headers_of_cryptsetup_open() {
    let luks1 = ["--type", "luks1", "--pbkdf-force-iterations", "1000"];
    let luks2 = ["--type", "luks2"];
    let argon = ["--pbkdf-force-iterations", "4", "--pbkdf-memory", "1024"];
    let pbkdf2 = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
    let cases: [(&[&str], &[&str], u32); 7] = [
        (&luks1, &["--hash", "sha1", "--key-size", "256"], 512),
        (&luks1, &["--hash", "sha256"], 512),
        (&luks1, &["--hash", "sha512", "--key-slot", "7"], 512),
        (&[&luks2[..], &argon].concat(), &["--pbkdf", "argon2id", "--sector-size", "4096"], 4096),
        (&[&luks2[..], &argon].concat(), &["--pbkdf", "argon2i", "--pbkdf-parallel", "4"], 4096),
        (
            &[&luks2[..], &pbkdf2].concat(),
            &["--hash", "sha512", "--sector-size", "2048", "--key-size", "256"],
            2048,
        ),
        (&[&luks2[..], &pbkdf2].concat(), &["--luks2-metadata-size", "65536", "--sector-size", "512"], 512),
    ];
    for (kind, options, sector_size) in cases {
        let volume = Volume::new();
        let options = [kind, options].concat();
        assert_success(&volume.cryptsetup("luksFormat", SECRET, &options));
        let header = volume.header();
        let segment = header.segment();
        assert_eq!(segment.sector_size, sector_size, "{options:?}");
        assert_eq!(volume.key(SECRET), volume.cryptsetup_key(SECRET), "{options:?}");
        assert_eq!(segment.cipher.key_len(), volume.key(SECRET).len());
        let mut uuid = Command::new("cryptsetup");
        uuid.arg("luksUUID").arg(volume.path("volume"));
        let uuid = String::from_utf8(run(uuid, b"").stdout).unwrap();
        assert_eq!(header.uuid().unwrap().to_string(), uuid.trim());
        let wrong = header.unlock(&mut volume.file(), OTHER, None, &Limits::default()).err().unwrap();
        assert!(matches!(wrong, Error::WrongSecret), "{wrong}");
    }
}

#[test]
fn cryptsetup_opens_our_headers_and_changes_them() {
    let cases = [
        (Version::V1, pbkdf2(Hash::Sha1), 512),
        (Version::V1, pbkdf2(Hash::Sha256), 512),
        (Version::V2, pbkdf2(Hash::Sha512), 1024),
        (Version::V2, ARGON2ID, 4096),
    ];
    for (version, kdf, sector_size) in cases {
        let volume = Volume::new();
        let key = volume.format(version, kdf, sector_size);
        assert!(volume.cryptsetup_opens(SECRET) && !volume.cryptsetup_opens(OTHER), "{kdf:?}");
        assert_eq!(volume.cryptsetup_key(SECRET), key);

        // A key slot of cryptsetup beside ours.
        let other = volume.path("other");
        std::fs::write(&other, OTHER).unwrap();
        let options = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", other.to_str().unwrap()];
        assert_success(&volume.cryptsetup("luksAddKey", SECRET, &options));
        assert_eq!(volume.key(OTHER), key);
        assert_eq!(volume.header().key_slots().len(), 2);

        // Ours beside cryptsetup's, in a place of its own; then without the first one.
        let (mut header, mut file) = (volume.header(), volume.file());
        let unlocked =
            header.unlock(&mut file, OTHER, Some(1), &Limits::default()).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(header.add_key_slot(&mut file, &unlocked.key, b"third", kdf, None).unwrap(), 2);
        header.remove_key_slot(&mut file, 0).unwrap();
        for secret in [OTHER, b"third"] {
            assert!(volume.cryptsetup_opens(secret), "{kdf:?}");
            assert_eq!(volume.key(secret), key);
        }
        assert!(!volume.cryptsetup_opens(SECRET));

        assert_success(&volume.cryptsetup("luksKillSlot", b"third", &["1"]));
        assert_eq!(volume.header().key_slots().iter().map(|slot| slot.number()).collect::<Vec<_>>(), [2]);
    }
}

#[test]
fn data_that_cryptsetup_encrypted_in_sectors_of_4096_bytes_is_read() {
    let volume = Volume::new();
    let data = random_data(1 << 20);
    std::fs::write(volume.path("data"), &data).unwrap();
    let mut command = Command::new("cryptsetup");
    command.args(["reencrypt", "--encrypt", "--force-offline-reencrypt", "--batch-mode", "--key-file", "-"]);
    command.args(["--type", "luks2", "--sector-size", "4096", "--pbkdf", "pbkdf2"]);
    command.args(["--pbkdf-force-iterations", "1000", "--header"]).arg(volume.path("volume"));
    command.arg(volume.path("data"));
    assert_success(&run(command, SECRET));

    let segment = volume.header().segment();
    assert_eq!((segment.offset, segment.sector_size), (0, 4096), "a detached header");
    let mut read = std::fs::read(volume.path("data")).unwrap();
    assert_ne!(read, data);
    crypt(&segment, &volume.key(SECRET), &mut read, true);
    assert_eq!(read, data);
}

#[test]
fn data_that_qemu_encrypted_is_read() {
    let volume = Volume::new();
    let data = random_data(1 << 20);
    std::fs::write(volume.path("data"), &data).unwrap();
    qemu_img(&volume, |command| {
        command.args(["convert", "-f", "raw", "-O", "luks", "-o", "key-secret=s,iter-time=10"]);
        command.arg(volume.path("data")).arg(volume.path("volume"));
    });
    let segment = volume.header().segment();
    let mut read = vec![0; data.len()];
    volume.file().read_exact_at(&mut read, segment.offset).unwrap();
    crypt(&segment, &volume.key(SECRET), &mut read, true);
    assert_eq!(read, data);
}

#[test]
fn qemu_reads_data_that_we_encrypted() {
    let volume = Volume::new();
    let key = volume.format(Version::V1, pbkdf2(Hash::Sha256), 512);
    let data = random_data((FILE_LEN - volume.header().segment().offset) as usize);
    let mut encrypted = data.clone();
    crypt(&volume.header().segment(), &key, &mut encrypted, false);
    volume.file().write_all_at(&encrypted, volume.header().segment().offset).unwrap();
    qemu_img(&volume, |command| {
        let source = format!("driver=luks,key-secret=s,file.filename={}", volume.path("volume").display());
        command.args(["convert", "--image-opts", &source, "-O", "raw"]).arg(volume.path("data"));
    });
    assert!(std::fs::read(volume.path("data")).unwrap() == data);
}

#[expect(clippy::disallowed_methods, reason = "another program measures real time")]
/// Runs `qemu-img` with [`SECRET`] as secret `s`. It fails at times while it measures how fast it is: then it runs again.
fn qemu_img(volume: &Volume, arguments: impl Fn(&mut Command)) {
    let secret: &Path = &volume.path("secret");
    std::fs::write(secret, SECRET).unwrap();
    let give_up = Instant::now() + Duration::from_secs(20);
    loop {
        let mut command = Command::new("qemu-img");
        arguments(&mut command);
        command.args(["--object", &format!("secret,id=s,file={}", secret.display())]);
        let output = run(command, b"");
        let error = String::from_utf8_lossy(&output.stderr);
        if !error.contains("accurate CPU usage") || Instant::now() > give_up {
            return assert_success(&output);
        }
    }
}
