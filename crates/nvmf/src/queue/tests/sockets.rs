//! What hosts can take of the buffers that all sockets of a reactor share.

use super::*;
use aryk_reactor::{CoreSet, Socket, SocketEvent};

/// A root that receives, and gives no buffer back.
struct Hoard {
    socket: Socket,
    kept: Vec<SocketEvent>,
    is_starved: bool,
}

impl Root for Hoard {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        while let Some(event) = self.socket.next_event(cx) {
            self.is_starved |= matches!(event, SocketEvent::Starved);
            self.kept.push(event);
        }
        if !self.is_starved {
            self.socket.receive(cx);
        }
        true
    }
}

#[test]
fn a_queue_goes_on_although_another_socket_has_all_buffers() {
    let (mut rig, control) = Rig::new();
    let cx = rig.bench.cx();
    if !cx.has_ring_sockets() {
        return rig.end();
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut greedy = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (socket, _) = listener.accept().unwrap();
    let thread = cx.add_thread("hoard", CoreSet::allowed());
    let hoard = cx.add_root(thread, "hoard", |root, cx| {
        let socket = Socket::open(socket.into(), root, cx)?;
        Ok::<_, std::os::fd::OwnedFd>(Hoard { socket, kept: Vec::new(), is_starved: false })
    });
    let id = hoard.unwrap().id();
    let hoard = cx.root::<Hoard>(id).unwrap();
    cx.wake(id);
    greedy.set_nonblocking(true).unwrap();
    while !hoard.borrow().is_starved {
        let _ = greedy.write(&[0; 1 << 16]);
        rig.turns(1);
    }
    // In capsules, and by R2T.
    let data = [1; BLOCK as usize];
    for cid in 0..20 {
        rig.send(&command_with(entry(cid, io::WRITE, 0, 1), &data));
        assert_eq!(rig.completions(1), [(cid, Code::SUCCESS)]);
    }
    rig.send(&command(entry(20, io::WRITE, 0, 32)));
    let [requested] = rig.requested();
    rig.answer(requested, &vec![1; 32 * BLOCK as usize]);
    assert_eq!(rig.completions(1), [(20, Code::SUCCESS)]);
    assert_eq!(control.count(Op::Write), 21);
    drop(hoard);
    drop(rig.bench.cx().take_root::<Hoard>(id));
    rig.end();
}

#[test]
fn a_poll_takes_a_limited_amount() {
    const COMMANDS: u16 = 24;
    let (mut rig, control) = Rig::new();
    let len = TRANSFER_MAX as u32;
    rig.send(
        &(0..COMMANDS).flat_map(|cid| command(entry(cid, io::WRITE, 0, len / BLOCK))).collect::<Vec<_>>(),
    );
    let requested: [R2t; COMMANDS as usize] = rig.requested();
    // The kernel fills the ring's buffers while the reactor makes no turn.
    let data = vec![1; TRANSFER_MAX];
    let mut bytes: VecDeque<u8> = VecDeque::new();
    for R2t { cid, tag, offset, len } in requested {
        bytes.extend(pdu(&Header::H2cData(H2cData { cid, tag, offset, len, is_last: true }), &data));
    }
    // A turn may poll a queue twice: because it has work, and because it is woken.
    let per_turn = 2 * ((tcp::TAKEN_MAX / TRANSFER_MAX) as u32 + 1);
    let mut done = 0;
    while done < u32::from(COMMANDS) {
        while let Ok(len) = rig.host.write(bytes.make_contiguous())
            && len > 0
        {
            bytes.drain(..len);
        }
        rig.turns(1);
        let now = control.count(Op::Write);
        assert!(now - done <= per_turn, "{} in one turn", now - done);
        done = now;
    }
    assert_eq!(rig.completions(COMMANDS.into()).len(), usize::from(COMMANDS));
    rig.end();
}
