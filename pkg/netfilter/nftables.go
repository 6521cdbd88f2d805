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

// nftables has the rules of nftables, which are those of the newer iptables as well. It remembers what it found: to look again
// costs next to nothing while nobody changes rules.
type nftables struct {
	questions
	generation uint32    // of the rules at the newest look; 0: there were none to look at
	newest     uint32    // and now
	absent     time.Time // when the kernel said that it has no nftables
	chains     [][]byte  // what the kernel says of all chains, during a look
}

// questions are put to nftables through one socket, since they are put all the time. The zero value is ready for use.
type questions struct {
	socket *nl.SocketHandle // nil: there is none yet
}

// askAbsent is how often a kernel without nftables is asked for it: the question
// makes it look for a module.
const askAbsent = time.Minute

const nftablesName = "nftables"

var familyNames = map[uint8]string{unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_INET: "inet"}

// changed implements ruleset.
func (n *nftables) changed(now time.Time) (bool, error) {
	if now.Sub(n.absent) < askAbsent {
		return n.generation != 0, nil
	}
	// The generation first: what changes during the look is for the next one.
	generation, err := n.newestGeneration()
	if noNftables(err) {
		n.absent, generation, err = now, 0, nil
	}
	if err != nil {
		return false, fmt.Errorf("ask for the generation of nftables: %w", err)
	}
	n.newest = generation
	return n.newest != n.generation, nil
}

// begin implements ruleset.
func (n *nftables) begin(time.Time) { n.generation = n.newest }

// pause implements ruleset.
func (n *nftables) pause() time.Duration { return lookAgain }

// listed has what the kernel says of all chains, once a look.
func (n *nftables) listed() (_ [][]byte, err error) {
	if n.chains != nil || n.newest == 0 {
		return n.chains, nil
	}
	if n.chains, err = n.ask(unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP, unix.AF_UNSPEC); err != nil {
		return nil, fmt.Errorf("list nftables chains: %w", err)
	}
	return n.chains, nil
}

// end implements ruleset.
func (n *nftables) end() { n.chains = nil }

// bases implements ruleset.
func (n *nftables) bases(families []int, all bool) (found []base, err error) {
	chains, err := n.listed()
	for _, m := range chains {
		if b, ok := readBase(m); ok && (b.nat || all) && (b.family == unix.NFPROTO_INET || slices.Contains(families, int(b.family))) {
			found = append(found, b) // NFPROTO_IPV4 is AF_INET, and so on
		}
	}
	return found, err
}

// rules implements ruleset.
func (n *nftables) rules(c chainID) (all []rule, err error) {
	answer, err := n.ask(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, c.family,
		nl.NewRtAttr(unix.NFTA_RULE_TABLE, nl.ZeroTerminated(c.table)), nl.NewRtAttr(unix.NFTA_RULE_CHAIN, nl.ZeroTerminated(c.name)))
	if err != nil {
		return nil, err
	}
	for _, m := range answer {
		// A kernel that does not filter sends those of others too.
		if a := attributes(m); text(a[unix.NFTA_RULE_TABLE]) == c.table && text(a[unix.NFTA_RULE_CHAIN]) == c.name && m[0] == c.family {
			all = append(all, readRule(m))
		}
	}
	return all, nil
}

// siblings implements ruleset.
func (n *nftables) siblings(c chainID) (all []chainID, err error) {
	chains, err := n.listed()
	for _, m := range chains {
		a := attributes(m)
		if len(a) > 0 && m[0] == c.family && text(a[unix.NFTA_CHAIN_TABLE]) == c.table && a[unix.NFTA_CHAIN_HOOK] == nil {
			all = append(all, chainID{nftablesName, c.family, c.table, text(a[unix.NFTA_CHAIN_NAME])})
		}
	}
	return all, err
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

// ask returns the kernel's answer. One that changes of rules have cut short is asked for again, a few times.
func (q *questions) ask(message, flags int, family uint8, attrs ...*nl.RtAttr) (answer [][]byte, err error) {
	for range 5 {
		if answer, err = q.askOnce(message, flags, family, attrs...); !errors.Is(err, nl.ErrDumpInterrupted) {
			return answer, err
		}
	}
	return answer, err
}

func (q *questions) askOnce(message, flags int, family uint8, attrs ...*nl.RtAttr) ([][]byte, error) {
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

// readBase reads one chain's message, if that is one that packets come to.
func readBase(m []byte) (b base, ok bool) {
	a := attributes(m)
	if a[unix.NFTA_CHAIN_HOOK] == nil || familyNames[m[0]] == "" {
		return base{}, false
	}
	hook := long(nested(a[unix.NFTA_CHAIN_HOOK])[unix.NFTA_HOOK_HOOKNUM])
	policy := a[unix.NFTA_CHAIN_POLICY]
	return base{chainID{nftablesName, m[0], text(a[unix.NFTA_CHAIN_TABLE]), text(a[unix.NFTA_CHAIN_NAME])}, hook, text(a[unix.NFTA_CHAIN_TYPE]) == "nat", policy != nil && long(policy) == dropped}, true
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
