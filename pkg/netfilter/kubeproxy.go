package netfilter

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const kubeProxyTable = "kube-proxy" // in nftables, of either family

// kubeProxyChains are those of its iptables and IPVS modes. KUBE-FIREWALL, KUBE-MARK-DROP, KUBE-IPTABLES-HINT and
// KUBE-KUBELET-CANARY are the kubelet's, others that begin so are those of networks and runtimes.
var kubeProxyChains = setOf([]string{
	"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-FORWARD", "KUBE-PROXY-FIREWALL", "KUBE-PROXY-CANARY",
	"KUBE-LOAD-BALANCER", "KUBE-NODE-PORT", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER", "KUBE-SOURCE-RANGES-FIREWALL",
})

// kubeProxyServices is what chains of its iptables mode begin with that are one Service's, or one endpoint's. The last is that
// of older versions.
var kubeProxyServices = []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-FW-", "KUBE-XLB-"}

// kubeProxySets are the ipsets of its IPVS mode. Those of IPv6 begin with KUBE-6-.
var kubeProxySets = []string{
	"KUBE-LOOP-BACK", "KUBE-CLUSTER-IP", "KUBE-EXTERNAL-IP", "KUBE-EXTERNAL-IP-LOCAL", "KUBE-LOAD-BALANCER", "KUBE-LOAD-BALANCER-LOCAL", "KUBE-LOAD-BALANCER-FW",
	"KUBE-LOAD-BALANCER-SOURCE-IP", "KUBE-LOAD-BALANCER-SOURCE-CIDR", "KUBE-NODE-PORT-TCP", "KUBE-NODE-PORT-LOCAL-TCP", "KUBE-NODE-PORT-UDP", "KUBE-NODE-PORT-LOCAL-UDP",
	"KUBE-NODE-PORT-SCTP-HASH", "KUBE-NODE-PORT-LOCAL-SCTP-HASH", "KUBE-HEALTH-CHECK-NODE-PORT", "KUBE-IPVS-IPS",
}

func isKubeProxys(chain string) bool {
	return kubeProxyChains[chain] || slices.ContainsFunc(kubeProxyServices, func(start string) bool { return strings.HasPrefix(chain, start) })
}

// RemoveKubeProxy removes the rules of a kube-proxy that does not run any more, whatever its mode was, and tells of each table that
// has changed. What can't be removed in one does not keep the others from being cleaned. The filter tables come last: what kube-proxy
// lets through it lets through for as long as it translates.
func RemoveKubeProxy(tell func(what string)) error {
	var q questions
	defer q.close()
	_, err := q.newestGeneration()
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("the kernel shows netfilter's rules to nobody without CAP_NET_ADMIN, so be root: %w", err)
	}
	if err != nil && !noNftables(err) {
		return fmt.Errorf("ask for the generation of nftables: %w", err)
	}
	hasNft := err == nil
	var errs []error
	for _, family := range families {
		if hasNft {
			errs = append(errs, removeTable(&nftTable{questions: &q, family: family, name: kubeProxyTable}, tell))
		}
	}
	for _, table := range []string{natTable, "mangle", "filter"} {
		for _, family := range families {
			if hasNft {
				errs = append(errs, removeKubeProxy(&nftTable{questions: &q, family: family, name: table}, tell))
			}
			older := &legacyTable{iptables: iptables{family: family}, table: table, lock: xtablesLock}
			errs = append(errs, removeKubeProxy(older, tell))
			older.close()
		}
	}
	return errors.Join(errs...)
}

// removeTable removes one that is nobody else's.
func removeTable(t *nftTable, tell func(string)) error {
	err := t.drop()
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", t, err)
	}
	tell(t.String())
	return nil
}

// removeKubeProxy removes kube-proxy's chains, and what leads there, from a table of iptables.
func removeKubeProxy(t editable, tell func(string)) error {
	r, err := edit(t, chooseKubeProxys)
	if err != nil || r.isEmpty() {
		return err
	}
	what := fmt.Sprintf("%s: %d chains, and %d rules that led there", t, len(r.chains), len(r.rules))
	if len(r.of) > 0 {
		what += "; left, as others' rules lead there: " + strings.Join(r.of, ", ")
	}
	tell(what)
	return nil
}

// chooseKubeProxys chooses kube-proxy's chains, but for those that others' chains lead to.
func chooseKubeProxys(l listing) (change, error) {
	builtIn, needed := setOf(hookNames), map[string]bool{}
	for _, rule := range l.rules {
		for _, s := range rule.steps {
			if s.act.does == jumps && !builtIn[rule.chain] && !isKubeProxys(rule.chain) && isKubeProxys(s.act.chain) {
				needed[s.act.chain] = true
			}
		}
	}
	var goes, stays []string
	for _, chain := range l.chains {
		switch {
		case needed[chain]:
			stays = append(stays, chain)
		case isKubeProxys(chain):
			goes = append(goes, chain)
		}
	}
	r := l.without(l.there(goes))
	r.of = stays
	return r, nil
}

// RemoveKubeProxySets removes the ipsets of kube-proxy's IPVS mode, which its rules must not need any more, and tells of each.
func RemoveKubeProxySets(tell func(what string)) error {
	if _, err := os.Stat("/sys/module/ip_set"); errors.Is(err, fs.ErrNotExist) {
		return nil // to ask for sets would load it
	}
	var errs []error
	for _, name := range kubeProxySets {
		for _, name := range []string{name, strings.Replace(name, "KUBE-", "KUBE-6-", 1)} {
			switch err := destroySet(name); {
			case err == nil:
				tell("ipset " + name)
			case !errors.Is(err, unix.ENOENT):
				errs = append(errs, fmt.Errorf("remove ipset %s: %w", name, err))
			}
		}
	}
	return errors.Join(errs...)
}

// destroySet waits for rules that were removed a moment ago: the kernel lets go of what they used a little later.
func destroySet(name string) (err error) {
	const (
		longest         = 31 // of a name, to which kube-proxy cuts its own
		attempts, pause = 20, 50 * time.Millisecond
	)
	for range attempts {
		req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_IPSET<<8|nl.IPSET_CMD_DESTROY, unix.NLM_F_ACK|unix.NLM_F_EXCL) // it must be there
		req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})                              // whatever the set is of
		req.AddData(nl.NewRtAttr(nl.IPSET_ATTR_PROTOCOL, []byte{nl.IPSET_PROTOCOL}))
		req.AddData(nl.NewRtAttr(nl.IPSET_ATTR_SETNAME, nl.ZeroTerminated(name[:min(len(name), longest)])))
		if _, err = req.Execute(unix.NETLINK_NETFILTER, 0); !errors.Is(err, unix.Errno(nl.IPSET_ERR_BUSY)) {
			return err
		}
		time.Sleep(pause)
	}
	return nl.IPSetError(nl.IPSET_ERR_BUSY)
}
