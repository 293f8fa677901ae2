//! Ranks over TCP: the options that only they use.

mod common;

use common::limits;
use dc::{Comm, CommOptions, Error};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

/// No launcher started this process, or it was the cluster's that runs the tests.
#[test]
fn a_launcher_says_the_rank() {
    let launch = dc::Launch::get().unwrap();
    assert!(launch.world_size >= 1 && (0..launch.world_size).contains(&launch.rank));
    assert!(launch.launcher != "none" || (launch.world_size == 1 && launch.address.is_none() && !launch.uses_mpi));
}

/// An address of this machine at which nothing listens.
fn address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// Rank 1's result when rank 0 has other options.
fn meet(first: CommOptions, second: CommOptions) -> Result<Vec<f32>, Error> {
    let address = address();
    let other = address.clone();
    let root = thread::spawn(move || {
        let mut data = [1.0f32];
        Comm::tcp(&address, "rust", 0, 2, &first).and_then(|comm| comm.all_reduce(&mut data, dc::ReduceOp::Sum))
    });
    let mut data = [2.0f32];
    let result = Comm::tcp(&other, "rust", 1, 2, &second)
        .and_then(|comm| comm.all_reduce(&mut data, dc::ReduceOp::Sum))
        .map(|_| data.to_vec());
    let _ = root.join().unwrap();
    result
}

fn with_secret(secret: &str) -> CommOptions {
    CommOptions { secret: Some(secret.into()), ..limits() }
}

#[test]
fn ranks_with_one_secret_meet() {
    let options = CommOptions {
        network: Some("127.0.0.0/8".into()),
        heartbeat: Some(Duration::from_millis(500)),
        ..with_secret("the secret of this run")
    };
    assert_eq!(meet(options.clone(), options).unwrap(), [3.0]);
}

#[test]
fn another_secret_is_refused() {
    let short = |secret| CommOptions { timeout: Some(Duration::from_secs(3)), ..with_secret(secret) };
    let error = meet(short("the secret of this run"), short("the secret of that run")).unwrap_err();
    assert!(error.to_string().contains("different secrets"), "{error}");
}

#[test]
fn a_secret_is_not_shown() {
    let options = with_secret("the secret of this run");
    assert!(!format!("{options:?}").contains("this run"));
    let error = Comm::tcp("127.0.0.1:1", "rust", 0, 2, &with_secret("with \0 in it, which C cannot have")).unwrap_err();
    assert!(error.to_string().contains("options.secret must not contain NUL"), "{error}");
    assert!(!error.to_string().contains("which C"), "{error}");
}
