// Package aryk is a client of arykd, the daemon that carries the I/O of virtual machines' disks.
//
// A [Client] has a function for each of the daemon's methods, with its parameters and its result as types. Any number of goroutines may
// use one: by a UNIX socket, their calls share a connection and overtake each other.
package aryk
