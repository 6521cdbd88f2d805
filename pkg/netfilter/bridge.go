package netfilter

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// BridgeName is the name of the table of ours that keeps connections.
const BridgeName = "ebpf-cni-flows"

// Bridge keeps the connections that netfilter translates when the rules go that have translated them: the kernel goes on with them only for
// as long as it has some chain that could translate, and some rule that needs connections. So this is one chain of both families with one rule,
// which does nothing. It works in the network namespace of the thread that calls it first, and is for one goroutine at a time. The zero
// value is ready for use.
type Bridge struct{ kept }

// ErrNoBridge says that the kernel lacks what the table is made of. It stays so until a module is loaded.
var ErrNoBridge = errors.New("the kernel lacks nft_ct, or nft_chain_nat for tables of the family inet")

// Ensure writes the table if it is not there as it should be; it reports whether it has. While nobody has changed rules it costs one
// question. A kernel that can't have it is asked again after a minute; until then the error stays, ErrNoBridge or ErrNoNftables for one.
func (b *Bridge) Ensure(now time.Time) (wrote bool, err error) {
	return b.ensure(now, bridge(), ErrNoBridge)
}

// Stands says whether the table is there, whoever keeps it.
func (b *Bridge) Stands() bool { return b.read(bridge()) != nil }

func bridge() layout {
	return layout{unix.NFPROTO_INET, BridgeName, []chain{{"input", natChain, unix.NF_INET_LOCAL_IN, filterPriority, translated()}}}
}

// Close closes what is kept open; the table stays.
func (b *Bridge) Close() { b.close() }

// RemoveBridge removes the table. It succeeds if there is none.
func RemoveBridge() error { return removeOwn(BridgeName, unix.NFPROTO_INET) }
