// Package e2e holds the end-to-end tests: the real agent and the real plugin, real packets, on the clusters of test/lab.
// They need root and the binaries that `make build` makes.
//
// Every test ends by asserting that its nodes have counted no drop but those that it provoked.
package e2e
