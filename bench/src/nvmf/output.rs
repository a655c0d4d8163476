//! What a side of a connection has to send: headers, and data from one constant buffer, in one system call for as much as the
//! socket takes.

use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::TcpStream;
use std::ops::Range;

/// Pieces of one system call, which is the number that the target has.
const PIECES_MAX: usize = 64;

#[derive(Clone, Debug)]
enum Piece {
    Header(Range<usize>),
    Data(Range<usize>),
}

/// Pieces that wait, in their order.
#[derive(Debug)]
pub struct Output {
    headers: Vec<u8>,
    data: Vec<u8>,
    pieces: VecDeque<Piece>,
    /// System calls that were made.
    pub calls: u64,
}

impl Output {
    /// An output whose data comes from a buffer of so many bytes.
    pub fn new(data_len: usize) -> Self {
        let data = (0..data_len).map(|at| (at * 7) as u8).collect();
        Self { headers: Vec::new(), data, pieces: VecDeque::new(), calls: 0 }
    }

    /// The constant data.
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Appends bytes.
    pub fn header(&mut self, bytes: &[u8]) {
        let from = self.headers.len();
        self.headers.extend_from_slice(bytes);
        // Headers that follow each other are one piece.
        if let Some(Piece::Header(range)) = self.pieces.back_mut()
            && range.end == from
        {
            range.end = self.headers.len();
            return;
        }
        self.pieces.push_back(Piece::Header(from..self.headers.len()));
    }

    /// Appends so many bytes of the constant data.
    pub fn constant(&mut self, range: Range<usize>) {
        self.pieces.push_back(Piece::Data(range));
    }

    /// Sends what the socket takes.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn flush(&mut self, socket: &TcpStream) -> rustix::io::Result<()> {
        while !self.pieces.is_empty() {
            let mut slices = [IoSlice::new(&[]); PIECES_MAX];
            let mut count = 0;
            for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
                *slice = IoSlice::new(match piece {
                    Piece::Header(range) => &self.headers[range.clone()],
                    Piece::Data(range) => &self.data[range.clone()],
                });
                count += 1;
            }
            self.calls += 1;
            match rustix::io::writev(socket, &slices[..count]) {
                Ok(len) => self.sent(len),
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.headers.clear();
        Ok(())
    }

    fn sent(&mut self, mut len: usize) {
        while let Some(Piece::Header(range) | Piece::Data(range)) = self.pieces.front_mut() {
            if range.len() > len {
                range.start += len;
                return;
            }
            len -= range.len();
            self.pieces.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Output;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn pieces_arrive_in_their_order_whatever_the_socket_takes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        sender.set_nonblocking(true).unwrap();
        let mut receiver = listener.accept().unwrap().0;
        let mut output = Output::new(100_000);
        let mut expected = Vec::new();
        for round in 0..200_u8 {
            output.header(&[round; 3]);
            output.header(&[round; 21]);
            output.constant(usize::from(round)..100_000);
            expected.extend([round; 24]);
            expected.extend(&output.data()[usize::from(round)..]);
        }
        let mut received = vec![0; expected.len()];
        let mut at = 0;
        while at < received.len() {
            output.flush(&sender).unwrap();
            at += receiver.read(&mut received[at..]).unwrap();
        }
        assert_eq!(received, expected);
        assert!(output.calls > 10);
    }
}
