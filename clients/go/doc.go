// Package aryk is a client of arykd, the daemon that serves the disks of virtual machines.
//
// A [Client] has a function for each of the daemon's methods, with its parameters and its result as types. Any number of goroutines may
// use one client: over a UNIX socket, their calls share a connection, and replies may come in another order.
package aryk
