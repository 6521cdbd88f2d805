package netfilter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// nftTable is a table of nftables; those of the newer iptables are such.
type nftTable struct {
	*questions
	family uint8
	name   string
	only   []string // the chains whose rules are listed; nil: all
	// generation is that of all of nftables at the newest list: the kernel does nothing that was decided by an older one.
	generation uint32
}

func (t *nftTable) String() string {
	return fmt.Sprintf("nftables table %s %s", familyNames[t.family], t.name)
}

// wholeTable is no chain's name.
const wholeTable = ""

// hasAny says whether one of these chains is there, or the table.
func (t *nftTable) hasAny(chains []string) (bool, error) {
	for _, chain := range chains {
		message, attrs := unix.NFT_MSG_GETCHAIN, t.chain(chain)
		if chain == wholeTable {
			message, attrs = unix.NFT_MSG_GETTABLE, []*nl.RtAttr{nl.NewRtAttr(unix.NFTA_TABLE_NAME, nl.ZeroTerminated(t.name))}
		}
		if _, err := t.ask(message, 0, t.family, attrs...); !errors.Is(err, unix.ENOENT) {
			if err != nil {
				err = fmt.Errorf("read %s: %w", t, err)
			}
			return err == nil, err
		}
	}
	return false, nil
}

func (t *nftTable) chain(name string) []*nl.RtAttr {
	return []*nl.RtAttr{nl.NewRtAttr(unix.NFTA_CHAIN_TABLE, nl.ZeroTerminated(t.name)), nl.NewRtAttr(unix.NFTA_CHAIN_NAME, nl.ZeroTerminated(name))}
}

// list implements editable.
func (t *nftTable) list() (l listing, err error) {
	if t.generation, err = t.newestGeneration(); err != nil {
		return l, err
	}
	chains, err := t.ask(unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP, t.family)
	if err != nil {
		return l, err
	}
	for _, m := range chains {
		if a := attributes(m); text(a[unix.NFTA_CHAIN_TABLE]) == t.name && m[0] == t.family {
			l.chains = append(l.chains, text(a[unix.NFTA_CHAIN_NAME]))
		}
	}
	if len(l.chains) == 0 {
		return l, nil
	}
	if t.only == nil {
		return l, t.listRules(&l, "")
	}
	for _, chain := range t.only {
		if slices.Contains(l.chains, chain) {
			if err := t.listRules(&l, chain); err != nil {
				return l, err
			}
		}
	}
	return l, nil
}

// listRules adds the rules of a chain, or of all, in their order.
func (t *nftTable) listRules(l *listing, chain string) error {
	attrs := []*nl.RtAttr{nl.NewRtAttr(unix.NFTA_RULE_TABLE, nl.ZeroTerminated(t.name))}
	if chain != "" {
		attrs = append(attrs, nl.NewRtAttr(unix.NFTA_RULE_CHAIN, nl.ZeroTerminated(chain)))
	}
	answer, err := t.ask(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, t.family, attrs...)
	for _, m := range answer {
		a := attributes(m)
		in, handle := text(a[unix.NFTA_RULE_CHAIN]), a[unix.NFTA_RULE_HANDLE]
		// A kernel that does not filter sends those of others too.
		if m[0] == t.family && text(a[unix.NFTA_RULE_TABLE]) == t.name && (chain == "" || in == chain) && len(handle) == 8 {
			l.rules = append(l.rules, placed{in, binary.BigEndian.Uint64(handle), readRule(m)})
		}
	}
	return err
}

const ruleComment = 0 // NFTNL_UDATA_RULE_COMMENT

// commentIn reads what is kept beside a rule. The kind stands before the length.
func commentIn(data []byte) string {
	for ; len(data) >= 2 && len(data) >= 2+int(data[1]); data = data[2+int(data[1]):] {
		if data[0] == ruleComment {
			return text(data[2 : 2+int(data[1])])
		}
	}
	return ""
}

// keep implements editable: the kernel compares generations.
func (t *nftTable) keep() (done func(), err error) { return func() {}, nil }

// apply implements editable.
func (t *nftTable) apply(r change) error {
	b := nftBatch{generation: t.generation}
	rule := func(chain string, more ...*nl.RtAttr) {
		b.add(unix.NFT_MSG_DELRULE, 0, t.family, append([]*nl.RtAttr{
			nl.NewRtAttr(unix.NFTA_RULE_TABLE, nl.ZeroTerminated(t.name)), nl.NewRtAttr(unix.NFTA_RULE_CHAIN, nl.ZeroTerminated(chain)),
		}, more...)...)
	}
	for _, p := range r.rules {
		rule(p.chain, nl.NewRtAttr(unix.NFTA_RULE_HANDLE, binary.BigEndian.AppendUint64(nil, p.at)))
	}
	for _, name := range r.chains { // all of its rules
		rule(name)
	}
	for _, name := range r.chains {
		b.add(unix.NFT_MSG_DELCHAIN, 0, t.family, t.chain(name)...)
	}
	for _, a := range r.accepts { // each before what is there
		e := nl.NewRtAttr(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, nil)
		for _, one := range a.expressions(t.family) {
			e.AddChild(one)
		}
		b.add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE, t.family, nl.NewRtAttr(unix.NFTA_RULE_TABLE, nl.ZeroTerminated(t.name)),
			nl.NewRtAttr(unix.NFTA_RULE_CHAIN, nl.ZeroTerminated(r.into)), e, nl.NewRtAttr(unix.NFTA_RULE_USERDATA, userComment(ForwardComment)))
	}
	return b.commitUnchanged()
}

// userComment is a comment as nft and iptables keep one beside a rule.
func userComment(said string) []byte {
	return append([]byte{ruleComment, byte(len(said) + 1)}, nl.ZeroTerminated(said)...)
}

// drop removes the table as it was listed last, with all that it has.
func (t *nftTable) drop() error {
	b := nftBatch{generation: t.generation}
	b.add(unix.NFT_MSG_DELTABLE, 0, t.family, nl.NewRtAttr(unix.NFTA_TABLE_NAME, nl.ZeroTerminated(t.name)))
	return b.commitUnchanged()
}

// commitUnchanged is commit for what was decided by the rules of a generation.
func (b *nftBatch) commitUnchanged() error {
	err := b.commit()
	switch {
	case errors.Is(err, unix.ERESTART):
		return errChanged
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("a rule elsewhere leads there: %w", err)
	}
	return err
}
