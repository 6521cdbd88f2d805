package netfilter

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// kept is a table of ours in nftables, which is written anew whenever it is not as it was left.
type kept struct {
	questions
	content    []byte    // of the table, as the kernel told it after it was written; nil: write it
	generation uint32    // of nftables at the newest look, which is never 0
	absent     time.Time // when the kernel said that it has no nftables, or does not understand the rules
	refused    error     // which of that it is
}

// layout is what a table should have.
type layout struct {
	family uint8
	name   string
	chains []chain
}

// chain is one that packets come to, with one rule.
type chain struct {
	name, kind string
	hook       uint32
	priority   int
	rule       []*nl.RtAttr
}

// The kinds of chains.
const (
	filterChain = "filter"
	natChain    = "nat"
)

// ErrNoNftables says that the kernel has none.
var ErrNoNftables = errors.New("the kernel has no nftables")

// ensure writes the table if it is not there as it should be. While nobody has changed rules it costs one question. What a kernel lacks is
// asked for again after a minute; until then the error stays: ErrNoNftables, or the one that says what rules like these take.
func (k *kept) ensure(now time.Time, want layout, takes error) (wrote bool, err error) {
	if now.Sub(k.absent) < askAbsent {
		return false, k.refused
	}
	generation, err := k.newestGeneration()
	if noNftables(err) {
		k.absent, k.refused = now, fmt.Errorf("%w: %w", ErrNoNftables, err)
		return false, k.refused
	}
	if err == nil && k.content != nil && (generation == k.generation || bytes.Equal(k.content, k.read(want))) {
		k.generation = generation
		return false, nil
	}
	if err == nil {
		err = want.write()
	}
	if err != nil {
		lacks := noNftables(err) || errors.Is(err, unix.ENOENT)
		if err = want.explain(err, takes); lacks {
			k.absent, k.refused = now, err
		}
		return false, err
	}
	k.generation, k.content = 0, k.read(want)
	return true, nil
}

// explain says what it means that the table can't be written.
func (l layout) explain(err, takes error) error {
	if errors.Is(err, unix.ENOENT) { // nothing else is asked for that may not be there
		err = fmt.Errorf("%w: %w", takes, err)
	}
	return fmt.Errorf("write nftables table %s: %w", l.name, err)
}

// read is what the kernel says of the table, its chains and rules; nothing, unless all of them are there.
func (k *kept) read(want layout) (content []byte) {
	get := func(least, message, flags int, attrs ...*nl.RtAttr) bool {
		answer, err := k.ask(message, flags, want.family, attrs...)
		for _, m := range answer {
			content = append(content, m[min(len(m), nl.SizeofNfgenmsg):]...) // the header has the generation
		}
		return err == nil && len(answer) >= least
	}
	there := get(1, unix.NFT_MSG_GETTABLE, 0, want.attr())
	for _, c := range want.chains {
		there = there && get(1, unix.NFT_MSG_GETCHAIN, 0, want.attr(), c.attr(unix.NFTA_CHAIN_NAME))
	}
	if !there || !get(len(want.chains), unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, want.attr()) {
		return nil
	}
	return content
}

// attr names the table; messages about chains and rules have the same number for that.
func (l layout) attr() *nl.RtAttr {
	return nl.NewRtAttr(unix.NFTA_TABLE_NAME, nl.ZeroTerminated(l.name))
}

// attr names the chain, as messages of one kind do.
func (c chain) attr(kind int) *nl.RtAttr { return nl.NewRtAttr(kind, nl.ZeroTerminated(c.name)) }

// write puts the table in the place of what there may be, in one transaction.
func (l layout) write() error {
	var b nftBatch
	b.add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, l.family, l.attr()) // so that there is one to delete
	b.add(unix.NFT_MSG_DELTABLE, 0, l.family, l.attr())
	b.add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, l.family, l.attr())
	for _, c := range l.chains {
		hook := nl.NewRtAttr(unix.NFTA_CHAIN_HOOK|unix.NLA_F_NESTED, nil)
		hook.AddRtAttr(unix.NFTA_HOOK_HOOKNUM, nl.BEUint32Attr(c.hook))
		hook.AddRtAttr(unix.NFTA_HOOK_PRIORITY, nl.BEUint32Attr(uint32(c.priority)))
		b.add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, l.family, l.attr(), c.attr(unix.NFTA_CHAIN_NAME), hook,
			nl.NewRtAttr(unix.NFTA_CHAIN_TYPE, nl.ZeroTerminated(c.kind)))
		rule := nl.NewRtAttr(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, nil)
		for _, e := range c.rule {
			rule.AddChild(e)
		}
		b.add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, l.family,
			l.attr(), c.attr(unix.NFTA_RULE_CHAIN), rule)
	}
	return b.commit()
}

// removeOwn removes tables of a name. It succeeds if there are none.
func removeOwn(name string, families ...uint8) error {
	for _, family := range families {
		var b nftBatch
		b.add(unix.NFT_MSG_DELTABLE, 0, family, nl.NewRtAttr(unix.NFTA_TABLE_NAME, nl.ZeroTerminated(name)))
		if err := b.commit(); err != nil && !errors.Is(err, unix.ENOENT) && !noNftables(err) {
			return fmt.Errorf("remove nftables table %s: %w", name, err)
		}
	}
	return nil
}
