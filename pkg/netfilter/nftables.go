package netfilter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// nftables finds rules in nftables, which has those of the newer iptables as
// well. It remembers what it saw: to look again costs next to nothing while
// nobody changes rules, and little while there are some that translate.
type nftables struct {
	questions
	generation uint32    // of the rules at the newest look, which is never 0
	of         []uint8   // the families of that look
	chain      natChain  // that translated then; the zero value: none
	absent     time.Time // when the kernel said that it has no nftables
}

// questions are put to nftables through one socket, since they are put all the time. The zero value is ready for use.
type questions struct {
	socket *nl.SocketHandle // nil: there is none yet
}

// askAbsent is how often a kernel without nftables is asked for it: the question
// makes it look for a module.
const askAbsent = time.Minute

// natChain is a chain that translates addresses.
type natChain struct {
	family      uint8
	table, name string
}

func (c natChain) String() string {
	family := map[uint8]string{unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_INET: "inet"}[c.family]
	return fmt.Sprintf("nftables table %s %s, chain %s", family, c.table, c.name)
}

// find says where a rule stands that translates addresses of these families; empty: nowhere.
func (n *nftables) find(now time.Time, of []uint8) (string, error) {
	if !slices.Equal(of, n.of) {
		n.of, n.generation, n.chain = slices.Clone(of), 0, natChain{}
	}
	if now.Sub(n.absent) < askAbsent {
		return "", nil
	}
	// The generation first: what changes during the look is for the next one.
	generation, err := n.newestGeneration()
	if noNftables(err) {
		n.absent, n.chain = now, natChain{}
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("ask for the generation of nftables: %w", err)
	}
	if generation != n.generation {
		if n.chain == (natChain{}) || !n.translates() {
			if n.chain, err = n.findNATChain(); err != nil {
				return "", fmt.Errorf("list nftables chains: %w", err)
			}
		}
		n.generation = generation
	}
	if n.chain == (natChain{}) {
		return "", nil
	}
	return n.chain.String(), nil
}

// noNftables reports whether err says that the kernel has no nftables.
func noNftables(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT)
}

// newestGeneration is a number that every change of rules changes.
func (q *questions) newestGeneration() (uint32, error) {
	answer, err := q.ask(unix.NFT_MSG_GETGEN, 0, unix.AF_UNSPEC)
	if err != nil {
		return 0, err
	}
	for _, m := range answer {
		if raw := attributes(m)[unix.NFTA_GEN_ID]; len(raw) == 4 {
			return binary.BigEndian.Uint32(raw), nil
		}
	}
	return 0, errors.New("the kernel's answer has none")
}

// translates reports whether the chain that translated still does.
func (n *nftables) translates() bool {
	c := n.chain
	answer, err := n.ask(unix.NFT_MSG_GETCHAIN, 0, c.family,
		nl.NewRtAttr(unix.NFTA_CHAIN_TABLE, nl.ZeroTerminated(c.table)), nl.NewRtAttr(unix.NFTA_CHAIN_NAME, nl.ZeroTerminated(c.name)))
	return err == nil && len(answer) == 1 && readNATChain(answer[0]) == c
}

// findNATChain looks through all chains, and at no rule.
func (n *nftables) findNATChain() (natChain, error) {
	answer, err := n.ask(unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP, unix.AF_UNSPEC)
	for _, m := range answer {
		if c := readNATChain(m); c.concerns(n.of) {
			return c, nil // also from a list that somebody's change has cut short
		}
	}
	return natChain{}, err
}

func (q *questions) ask(message, flags int, family uint8, attrs ...*nl.RtAttr) ([][]byte, error) {
	if q.socket == nil {
		s, err := nl.Subscribe(unix.NETLINK_NETFILTER) // to no group
		if err != nil {
			return nil, err
		}
		q.socket = &nl.SocketHandle{Socket: s}
	}
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|message, flags)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	for _, a := range attrs {
		req.AddData(a)
	}
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: q.socket}
	answer, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		q.close() // whatever is left in it of the answer
	}
	return answer, err
}

func (q *questions) close() {
	if q.socket != nil {
		q.socket.Close()
		q.socket = nil
	}
}

// readNATChain reads one chain's message. It returns the zero value for a chain
// that does not translate: one of another type, and one without rules, as listing
// the rules of iptables leaves them.
func readNATChain(m []byte) natChain {
	attrs := attributes(m)
	uses := attrs[unix.NFTA_CHAIN_USE]
	// Nothing can jump to a base chain: what uses it are its rules.
	if text(attrs[unix.NFTA_CHAIN_TYPE]) != "nat" || attrs[unix.NFTA_CHAIN_HOOK] == nil || len(uses) != 4 || binary.BigEndian.Uint32(uses) == 0 {
		return natChain{}
	}
	if family := m[0]; family == unix.NFPROTO_IPV4 || family == unix.NFPROTO_IPV6 || family == unix.NFPROTO_INET {
		return natChain{family, text(attrs[unix.NFTA_CHAIN_TABLE]), text(attrs[unix.NFTA_CHAIN_NAME])}
	}
	return natChain{}
}

// concerns says that a chain translates addresses of one of these families.
func (c natChain) concerns(families []uint8) bool {
	return c.family == unix.NFPROTO_INET || c != natChain{} && slices.Contains(families, c.family) // NFPROTO_IPV4 is AF_INET, and so on
}

func text(raw []byte) string { return unix.ByteSliceToString(raw) }

// attributes are those of a message of netfilter's; none, of one that is malformed.
func attributes(m []byte) map[uint16][]byte {
	if len(m) < nl.SizeofNfgenmsg {
		return nil
	}
	list, err := nl.ParseRouteAttr(m[nl.SizeofNfgenmsg:])
	if err != nil {
		return nil
	}
	all := make(map[uint16][]byte, len(list))
	for _, a := range list {
		all[a.Attr.Type&nl.NLA_TYPE_MASK] = a.Value
	}
	return all
}
