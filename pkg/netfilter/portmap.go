package netfilter

import (
	"cmp"
	"crypto/sha512"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Portmap sweeps what the CNI plugin portmap has left of pods that are gone: in tables of the newer iptables and of the older, and in
// tables of its own in nftables. It is for one goroutine at a time, and works in the network namespace of the thread that sweeps first.
//
//	p := netfilter.Portmap{Network: "ebpf-cni", Pods: podCIDRs, Living: living}
//	swept, err := p.Sweep(time.Now())
type Portmap struct {
	// Network is the name of the network whose pods they were; rules of others' stay.
	Network string
	// Pods are where that network's pods have their addresses. What portmap keeps in nftables itself does not name the network.
	Pods []netip.Prefix
	// Living are the containers that are there. It is asked after rules have been read, and no more rules are looked at than were there
	// then: a pod is written down before portmap works on it. After an error nothing is swept.
	Living func() (map[string]bool, error)
	// Lock is the file by which iptables is kept away from tables of the older form; empty: where iptables has it.
	Lock string

	ask      questions
	absent   time.Time // when the kernel said that it has no nftables
	nothing  uint32    // the generation of nftables in which there was nothing of portmap's; 0: there may be
	iptables [2]legacyTable
	without  [2]tableInfo // of each, as it was when there was nothing of portmap's
	read     [2]time.Time // when that was, or when it was swept
	late     bool         // one is not read again yet
}

// What portmap calls its chains of iptables. Each pod has one, the older versions' another one; the rules that lead there name it.
const (
	portmapPods   = "CNI-HOSTPORT-DNAT"
	portmapPod    = "CNI-DN-"
	portmapOldPod = "CNI-SN-"
	portmapTable  = "cni_hostport" // in nftables
)

// portmapShared are the chains that all pods of all networks have in common.
var portmapShared = []string{portmapPods, "CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ", "CNI-HOSTPORT-SNAT"}

// portmapPlaces are the chains in which rules lead to portmap's.
var portmapPlaces = append([]string{"PREROUTING", "OUTPUT", "POSTROUTING"}, portmapShared...)

// portmapTableChains are those of its own tables, and which of them have rules of pods.
var portmapTableChains = map[string]bool{
	"hostports": true, "hostip_hostports": true, "masquerading": true, "hostports_all": false, "prerouting": false, "output": false,
}

var families = [2]uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6}

// Sweep removes the rules of pods that are gone, and says of which containers. With the last pod of any network all that they had in
// common goes as well, and nothing translates any more. While portmap has no rules it costs a question or two. What can't be
// swept in one place does not keep the others from being swept.
func (p *Portmap) Sweep(now time.Time) (swept []string, err error) {
	swept, err = p.sweepNftables(now)
	p.late = false
	for i := range families {
		more, moreErr := p.sweepIptables(i, now)
		swept, err = append(swept, more...), errors.Join(err, moreErr)
	}
	slices.Sort(swept)
	return slices.Compact(swept), err
}

// Late says that the newest sweep has left out a large table, which takes long to read, since another one had read it shortly before.
func (p *Portmap) Late() bool { return p.late }

// Close closes what is kept open.
func (p *Portmap) Close() {
	p.ask.close()
	for i := range p.iptables {
		p.iptables[i].close()
	}
}

// sweepNftables sweeps what is in nftables, if anything of portmap's is.
func (p *Portmap) sweepNftables(now time.Time) (swept []string, err error) {
	if now.Sub(p.absent) < askAbsent {
		return nil, nil
	}
	generation, err := p.ask.newestGeneration()
	if noNftables(err) {
		p.absent = now
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ask for the generation of nftables: %w", err)
	}
	if generation == p.nothing {
		return nil, nil
	}
	found := false
	for _, family := range families {
		nat := nftTable{questions: &p.ask, family: family, name: natTable, only: portmapPlaces}
		own := nftTable{questions: &p.ask, family: family, name: portmapTable}
		for _, place := range []struct {
			table *nftTable
			signs []string
			sweep func(*nftTable) ([]string, error)
		}{{&nat, portmapShared, func(t *nftTable) ([]string, error) { return p.sweepNat(t) }}, {&own, []string{wholeTable}, p.sweepOwn}} {
			there, placeErr := place.table.hasAny(place.signs)
			if there {
				found = true
				var more []string
				more, placeErr = place.sweep(place.table)
				swept = append(swept, more...)
			}
			err = errors.Join(err, placeErr)
		}
	}
	if p.nothing = 0; !found && err == nil {
		p.nothing = generation
	}
	return swept, err
}

// sweepNat sweeps a table of iptables'.
func (p *Portmap) sweepNat(t editable) ([]string, error) {
	r, err := edit(t, p.choosePods)
	if err != nil {
		return nil, err
	}
	_, err = edit(t, chooseShared)
	return r.of, err
}

// sweepIptables sweeps the table of a family's older iptables.
func (p *Portmap) sweepIptables(i int, now time.Time) ([]string, error) {
	t := &p.iptables[i]
	t.family, t.table, t.only, t.lock = families[i], natTable, portmapPlaces, cmp.Or(p.Lock, xtablesLock)
	if !slices.Contains(t.has(), natTable) {
		return nil, nil
	}
	var info tableInfo
	if err := t.withSocket(func(fd, level int) error { return getTableInfo(fd, level, natTable, &info) }); err != nil {
		return nil, fmt.Errorf("read %s: %w", t, err)
	}
	if info == p.without[i] { // as good as surely nobody has written there
		return nil, nil
	}
	if !info.isSmall() && now.Sub(p.read[i]) < readLarge {
		p.late = true
		return nil, nil
	}
	p.read[i] = now
	swept, err := p.sweepNat(t)
	if p.without[i] = (tableInfo{}); err == nil && t.blob != nil && !slices.ContainsFunc(slices.Collect(maps.Values(t.blob.names)), isPortmaps) {
		p.without[i] = t.blob.info
	}
	return swept, err
}

func isPortmaps(chain string) bool { return isPod(chain) || slices.Contains(portmapShared, chain) }

func isPod(chain string) bool {
	return strings.HasPrefix(chain, portmapPod) || strings.HasPrefix(chain, portmapOldPod)
}

// choosePods chooses, among the rules of an iptables, those of pods that are gone.
func (p *Portmap) choosePods(l listing) (r change, err error) {
	if !slices.Contains(l.chains, portmapPods) {
		return r, nil
	}
	living, err := p.Living()
	if err != nil {
		return r, err
	}
	var goes, of []string
	for _, rule := range l.rules {
		if id := p.container(rule); id != "" && !living[id] {
			goes, of = append(goes, portmapChains(p.Network, id)...), append(of, id)
		}
	}
	r = l.without(l.there(goes))
	r.of = of
	return r, nil
}

// chooseShared chooses what all pods have in common, once there is none. A network that comes to its first pod at that very
// moment finds its own rules without what they need, says so, and is asked again.
func chooseShared(l listing) (change, error) {
	leadsOn := func(r placed) bool { return r.chain == portmapPods }
	if slices.ContainsFunc(l.chains, isPod) || slices.ContainsFunc(l.rules, leadsOn) {
		return change{}, nil
	}
	return l.without(l.there(portmapShared)), nil
}

var portmapComment = regexp.MustCompile(`^dnat name: "([^"]*)" id: "([^"]*)"$`)

// container is whose rules a rule leads to, if it is portmap's, for a pod of our network: its comment says so, and the chain's name
// comes from that.
func (p *Portmap) container(r placed) string {
	said := portmapComment.FindStringSubmatch(r.comment)
	if r.chain != portmapPods || said == nil || said[1] != p.Network || !r.leadsTo(setOf(portmapChains(said[1], said[2]))) {
		return ""
	}
	return said[2]
}

// portmapChains are those that a pod may have.
func portmapChains(network, container string) []string {
	const length = 28 // of a name
	sum := fmt.Sprintf("%x", sha512.Sum512([]byte(network+container)))
	return []string{(portmapPod + sum)[:length], (portmapOldPod + sum)[:length]}
}

// sweepOwn sweeps a table of portmap's own. It is removed with the last rule of any pod, unless others have put something there.
func (p *Portmap) sweepOwn(t *nftTable) ([]string, error) {
	r, err := edit(t, p.chooseOwn)
	if err != nil {
		return nil, err
	}
	l, err := t.list()
	if err != nil || len(l.chains) == 0 {
		return r.of, err
	}
	ofPod := func(r placed) bool { return portmapTableChains[r.chain] }
	others := func(chain string) bool { _, known := portmapTableChains[chain]; return !known }
	if slices.ContainsFunc(l.rules, ofPod) || slices.ContainsFunc(l.chains, others) {
		return r.of, nil
	}
	if err := t.drop(); err != nil && !errors.Is(err, errChanged) { // it is in use again
		return r.of, fmt.Errorf("remove %s: %w", t, err)
	}
	return r.of, nil
}

// chooseOwn chooses among the rules of portmap's own table, which have nothing but the container's name as a comment.
func (p *Portmap) chooseOwn(l listing) (r change, err error) {
	living, err := p.Living()
	if err != nil {
		return r, err
	}
	for _, rule := range l.rules {
		if portmapTableChains[rule.chain] && rule.comment != "" && !living[rule.comment] && p.isOfPod(rule) {
			r.rules, r.of = append(r.rules, rule), append(r.of, rule.comment)
		}
	}
	return r, nil
}

// isOfPod says that a rule is about one of our network's pods: it gives packets a pod's address, or masquerades what is sent there.
func (p *Portmap) isOfPod(r placed) bool {
	return slices.ContainsFunc(r.steps, func(s step) bool {
		to := s.act.to.first
		if s.match.of == destination && !s.match.not && s.match.prefix.IsSingleIP() && r.chain == "masquerading" {
			to = s.match.prefix.Addr()
		}
		return to.IsValid() && slices.ContainsFunc(p.Pods, func(pods netip.Prefix) bool { return pods.Contains(to) })
	})
}
