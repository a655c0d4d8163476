//! Prints the OpenRPC document of all methods. `cargo xtask generate` makes the reference and the clients from it.
#![forbid(unsafe_code)]

fn main() {
    println!("{:#}", aryk_rpc::openrpc::document());
}
