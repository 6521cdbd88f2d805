// Package e2e holds the end-to-end tests: the real agent and the real plugin, real packets, on the clusters of test/lab.
// They need root and the binaries that `make build` makes.
//
// Tests stand beside each other (t.Parallel), each in a lab of its own, since most of their time is spent waiting. Alone,
// before all others, run those that make an executable and start it, which the kernel refuses (ETXTBSY) while the child of
// another test still has it open for writing, and those that compare rates.
//
// Every test ends by asserting that its nodes have counted no drop but those that it provoked.
package e2e
