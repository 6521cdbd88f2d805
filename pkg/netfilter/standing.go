package netfilter

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Standing says where rules of a kube-proxy stand that lead packets to Services, for people; empty: nowhere.
type Standing struct{ IPv4, IPv6 string }

// KubeProxy looks, again and again, for the rules of a kube-proxy that lead packets to Services, whatever its mode is: kubelets, and a
// kube-proxy that has ended, leave chains that nothing leads to, and one that begins makes a way to an empty one. It asks for these rules alone, since with many Services there are very
// many others, which change all the time. It looks into the network namespace of the thread that looks first, and is for one goroutine at
// a time. The zero value is ready for use.
type KubeProxy struct {
	newer nftables
	found [2]string   // in nftables, of each of families
	older [2]olderNAT // of each of families
}

// servicesChain is the one that built-in chains of its iptables and IPVS modes lead to.
const servicesChain = "KUBE-SERVICES"

// Look says where such rules stand. After an error, what was known before stays.
func (k *KubeProxy) Look(now time.Time) (Standing, error) {
	errs := []error{k.lookAtNftables(now)}
	var all [2]string
	for i, family := range families {
		k.older[i].family = family
		errs = append(errs, k.older[i].look(now))
		all[i] = cmp.Or(k.found[i], k.older[i].found)
	}
	return Standing{IPv4: all[0], IPv6: all[1]}, errors.Join(errs...)
}

// Close closes what is kept open.
func (k *KubeProxy) Close() {
	k.newer.close()
	for i := range k.older {
		k.older[i].close()
	}
}

// lookAtNftables looks anew if rules have changed.
func (k *KubeProxy) lookAtNftables(now time.Time) error {
	if changed, err := k.newer.changed(now); err != nil || !changed {
		return err
	}
	var errs []error
	for i, family := range families {
		where, err := "", error(nil)
		if k.newer.newest != 0 {
			where, err = k.findIn(family)
		}
		if err == nil {
			k.found[i] = where
		}
		errs = append(errs, err)
	}
	k.newer.end()
	err := errors.Join(errs...)
	if err == nil {
		k.newer.begin(now)
	}
	return err
}

// findIn looks through nftables, in which rules may come and go meanwhile.
func (k *KubeProxy) findIn(family uint8) (string, error) {
	where, err := k.ownTable(family)
	if where != "" || err != nil {
		return where, err
	}
	nat := nftTable{questions: &k.newer.questions, family: family, name: natTable}
	if there, err := nat.hasAny([]string{servicesChain}); err != nil || !there {
		return "", err
	}
	where, jumps, err := leadsToServices(&k.newer, nftablesName, family)
	if jumps == 0 || err != nil {
		return "", err
	}
	uses, err := k.uses(nat.chain(servicesChain), family)
	if uses == jumps || err != nil { // nothing but jumps: it has no rule
		return "", err
	}
	return where, nil
}

// uses is how many rules a chain has, and how many lead there. To read those of kube-proxy's would be dear.
func (k *KubeProxy) uses(chain []*nl.RtAttr, family uint8) (uses int, err error) {
	answer, err := k.newer.ask(unix.NFT_MSG_GETCHAIN, 0, family, chain...)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return 0, fmt.Errorf("read chain %s: %w", servicesChain, err)
	}
	for _, m := range answer {
		uses = int(long(attributes(m)[unix.NFTA_CHAIN_USE]))
	}
	return uses, nil
}

// ownTable is the chain by which packets get to the table of the nftables mode.
func (k *KubeProxy) ownTable(family uint8) (string, error) {
	own := nftTable{questions: &k.newer.questions, family: family, name: kubeProxyTable}
	if there, err := own.hasAny([]string{wholeTable}); err != nil || !there {
		return "", err
	}
	answer, err := k.newer.ask(unix.NFT_MSG_GETCHAIN, 0, family, own.chain("nat-prerouting")...)
	for _, m := range answer {
		if b, ok := readBase(m); ok && b.nat {
			return b.String(), nil
		}
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return "", fmt.Errorf("read %s: %w", &own, err)
	}
	bases, err := k.newer.bases([]int{int(family)}, false) // by whatever name
	for _, b := range bases {
		if b.family == family && b.table == kubeProxyTable {
			return b.String(), nil
		}
	}
	return "", err
}

// leadsToServices looks for rules of built-in chains that lead to kube-proxy's, which has them before it has any for Services.
func leadsToServices(set ruleset, program string, family uint8) (where string, jumps int, err error) {
	for _, hook := range []int{hookPrerouting, hookOutput} {
		at := chainID{program, family, natTable, hookNames[hook]}
		rules, err := set.rules(at)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return "", 0, fmt.Errorf("read %s: %w", at, err)
		}
		for _, r := range rules {
			if r.leadsTo(map[string]bool{servicesChain: true}) {
				where, jumps = cmp.Or(where, at.String()+": "+r.text), jumps+1
			}
		}
	}
	return where, jumps, nil
}

// olderNAT is the nat table of the older iptables, which is read as a whole or not at all.
type olderNAT struct {
	iptables
	found string
	empty bool // kube-proxy's chain is led to and has no rule yet
}

// look reads the table when the built-in chains have got longer or shorter, which the kernel tells for nothing. Other rules change all
// the time. That somebody puts a rule in the place of one as long is seen after a while, as when a large table has it.
func (o *olderNAT) look(now time.Time) error {
	if _, err := o.changed(now); err != nil {
		return err
	}
	same := o.newest == o.info || !o.newest.isSmall() && !o.empty
	if same && o.newest.builtIn() == o.info.builtIn() && (!o.newest.hasRules() || now.Sub(o.read) < readLarge) {
		return nil
	}
	where, empty := "", false
	if o.newest.hasRules() {
		defer o.end()
		var err error
		if where, empty, err = o.find(); err != nil {
			return err
		}
	}
	o.found, o.empty = where, empty
	o.begin(now)
	return nil
}

// find reads the table.
func (o *olderNAT) find() (where string, empty bool, err error) {
	where, jumps, err := leadsToServices(&o.iptables, o.name(), o.family)
	if jumps == 0 || err != nil {
		return "", false, err
	}
	rules, err := o.rules(chainID{o.name(), o.family, natTable, servicesChain})
	if len(rules) <= 1 || err != nil { // the last one is the kernel's: it returns
		return "", err == nil, err
	}
	return where, false, nil
}

// builtIn is how long the chains are that packets come to first, in bytes.
func (i *tableInfo) builtIn() [2]uint32 {
	length := func(hook int) uint32 { return i.Underflow[hook] - i.HookEntry[hook] }
	return [2]uint32{length(hookPrerouting), length(hookOutput)}
}
