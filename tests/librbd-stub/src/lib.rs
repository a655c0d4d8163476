//! A substitute for Ceph's librados and librbd, in memory, for tests. As a shared library, it stands in for librbd.so.1; linked
//! into a test, [`library`] returns its functions, and the test scripts it by [`StubImage`].
//!
//! Images are those of the process. [`add_image`] creates one, and so does the first use of a name with options, which is how a
//! test scripts a daemon: `NAME+size=BYTES`, with `+delay=US` (microseconds, up to twice that), `+fail=ERRNO` (each request),
//! `+open=never`, `+open=ERRNO` (with `+if=NAME`: while that file exists), `+close=never`, `+gate=NAME`: while the file NAME is
//! in the directory `$LIBRBD_STUB_DIR`, the image's requests wait. The file `counts` there has what [`Counts`] says. A pool whose
//! name begins with `missing` does not exist. A client of the user `nobody` cannot connect, and the connection of the user
//! `stuck` takes until [`let_stuck_connect`].
#![deny(unsafe_op_in_unsafe_fn)]

mod counts;
mod exports;
mod gate;
mod image;
mod later;

pub use counts::{Counts, counts};
pub use image::{Held, Script, StubImage};

use aryk_librbd::{Library, Symbols};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// Pool, namespace, image.
type Place = (String, String, String);

#[derive(Default)]
struct World {
    images: BTreeMap<Place, Arc<StubImage>>,
    /// Clients that are excluded, and how often that was done.
    blocklist: BTreeMap<String, u64>,
    clients: u64,
    /// Clients that were created and not shut down, by their addresses.
    present: BTreeMap<String, Present>,
    stuck_may_connect: bool,
}

/// What is known of a client.
#[derive(Default)]
struct Present {
    user: String,
    options: BTreeMap<String, String>,
}

static WORLD: Mutex<World> = Mutex::new(World {
    images: BTreeMap::new(),
    blocklist: BTreeMap::new(),
    clients: 0,
    present: BTreeMap::new(),
    stuck_may_connect: false,
});
static CHANGED: Condvar = Condvar::new();

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A client.
#[derive(Debug)]
struct Client {
    user: String,
    addresses: String,
}

impl Client {
    fn new(user: String) -> Self {
        let mut world = lock(&WORLD);
        world.clients += 1;
        let addresses = format!("127.0.0.1:0/{}", u64::from(std::process::id()) << 20 | world.clients);
        let present = Present { user: user.clone(), ..Present::default() };
        world.present.insert(addresses.clone(), present);
        drop(world);
        counts::count(|counts| counts.clients += 1);
        Self { user, addresses }
    }

    fn is_blocklisted(&self) -> bool {
        lock(&WORLD).blocklist.contains_key(&self.addresses)
    }

    fn connect(&self) -> i32 {
        match &*self.user {
            "nobody" => -libc::EACCES,
            "stuck" => {
                let may_connect = |world: &mut World| !world.stuck_may_connect;
                let connected = CHANGED.wait_while(lock(&WORLD), may_connect);
                drop(connected);
                0
            }
            _ => 0,
        }
    }
}

/// Lets clients of the user `stuck` connect.
pub fn let_stuck_connect() {
    lock(&WORLD).stuck_may_connect = true;
    CHANGED.notify_all();
}

/// Excludes a client, as another client would.
pub fn blocklist(addresses: &str) {
    *lock(&WORLD).blocklist.entry(addresses.to_owned()).or_default() += 1;
}

/// Whether the client with these addresses is excluded.
pub fn is_blocklisted(addresses: &str) -> bool {
    exclusions_of(addresses) > 0
}

/// How often the client with these addresses was excluded.
pub fn exclusions_of(addresses: &str) -> u64 {
    lock(&WORLD).blocklist.get(addresses).copied().unwrap_or_default()
}

/// Whether the client with these addresses was created and not shut down.
pub fn has_client(addresses: &str) -> bool {
    lock(&WORLD).present.contains_key(addresses)
}

/// Number of clients of a user that were created and not shut down.
pub fn clients_of(user: &str) -> usize {
    lock(&WORLD).present.values().filter(|present| present.user == user).count()
}

/// The value of an option that was set for the client with these addresses.
pub fn option(addresses: &str, name: &str) -> Option<String> {
    lock(&WORLD).present.get(addresses)?.options.get(name).cloned()
}

/// Creates an image, empty, in the default namespace.
pub fn add_image(pool: &str, name: &str, size: u64) -> Arc<StubImage> {
    let image = Arc::new(StubImage::new(size, Script::default()));
    let place = (pool.to_owned(), String::new(), name.to_owned());
    lock(&WORLD).images.insert(place, Arc::clone(&image));
    image
}

/// The image of that name, if there is one or the name has options.
fn find_image(place: &Place) -> Option<Arc<StubImage>> {
    let mut world = lock(&WORLD);
    if let Some(image) = world.images.get(place) {
        return Some(Arc::clone(image));
    }
    let (size, script) = image::options(&place.2)?;
    let image = Arc::new(StubImage::new(size, script));
    world.images.insert(place.clone(), Arc::clone(&image));
    Some(image)
}

struct Linked;

impl Symbols for Linked {
    fn find(&self, name: &CStr) -> *const c_void {
        exports::find(name.to_str().unwrap_or_default())
    }
}

/// The functions of this crate.
///
/// # Panics
/// If one is missing.
pub fn library() -> Library {
    // SAFETY: the functions have the signatures and the behaviour of Ceph's, and are linked into the process.
    unsafe { Library::of(&Linked) }.expect("the stub has all functions")
}
