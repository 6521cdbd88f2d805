package agent

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// message is one request to nftables, for IPv4.
func message(kind, flags int, resource uint16, attrs ...*nl.RtAttr) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(kind, flags)
	family := uint8(unix.AF_INET)
	if kind == unix.NFNL_MSG_BATCH_BEGIN || kind == unix.NFNL_MSG_BATCH_END {
		family = unix.AF_UNSPEC
	}
	req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0, ResId: nl.Swap16(resource)})
	for _, a := range attrs {
		req.AddData(a)
	}
	return req
}

// addChain makes a table with a chain in the current namespace.
func addChain(t *testing.T, table, chain string) {
	t.Helper()
	const create = unix.NLM_F_CREATE | unix.NLM_F_ACK
	kind := func(m int) int { return unix.NFNL_SUBSYS_NFTABLES<<8 | m }
	text := func(attr int, s string) *nl.RtAttr { return nl.NewRtAttr(attr, nl.ZeroTerminated(s)) }
	var batch []byte
	for _, m := range []*nl.NetlinkRequest{
		message(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.NFNL_SUBSYS_NFTABLES),
		message(kind(unix.NFT_MSG_NEWTABLE), create, 0, text(unix.NFTA_TABLE_NAME, table)),
		message(kind(unix.NFT_MSG_NEWCHAIN), create, 0, text(unix.NFTA_CHAIN_TABLE, table), text(unix.NFTA_CHAIN_NAME, chain)),
		message(unix.NFNL_MSG_BATCH_END, 0, unix.NFNL_SUBSYS_NFTABLES),
	} {
		batch = append(batch, m.Serialize()...) //nolint:misspell // the library's spelling
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, batch, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the answers for table and chain
		answer := make([]byte, 4096)
		if _, _, err := unix.Recvfrom(fd, answer, 0); err != nil {
			t.Fatal(err)
		}
		if code := int32(nl.NativeEndian().Uint32(answer[unix.SizeofNlMsghdr:])); code != 0 {
			t.Fatalf("add chain %s to table %s: %v", chain, table, unix.Errno(-code))
		}
	}
}

func TestFindServiceRules(t *testing.T) {
	priv.Isolate(t)
	find := func(want string) {
		t.Helper()
		where, err := findServiceRules()
		if err != nil || (where == "") != (want == "") || !strings.Contains(where, want) {
			t.Errorf("found %q, error %v, want %q", where, err, want)
		}
	}
	find("")
	addChain(t, "nat", "POSTROUTING")
	addChain(t, "filter", "KUBE-FORWARD")
	find("")
	addChain(t, "nat", "KUBE-SERVICES")
	find("table nat, chain KUBE-SERVICES")
}

func TestFindServiceRulesOfNftablesMode(t *testing.T) {
	priv.Isolate(t)
	addChain(t, "kube-proxy", "services")
	if where, err := findServiceRules(); err != nil || !strings.Contains(where, "table kube-proxy") {
		t.Errorf("found %q, error %v", where, err)
	}
}

func TestFindServiceRulesOfOldIptables(t *testing.T) {
	priv.Isolate(t)
	if out, err := exec.Command("iptables-legacy", "-t", "nat", "-N", "KUBE-SERVICES").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if where, err := findServiceRules(); err != nil || where != "iptables table nat, chain KUBE-SERVICES" {
		t.Errorf("found %q, error %v", where, err)
	}
}

func TestServiceChainInRubbish(t *testing.T) {
	for _, m := range [][]byte{nil, {1}, make([]byte, 4), append(make([]byte, 4), 0xff, 0xff, 1, 0), append(make([]byte, 4), 3, 0, 3, 0)} {
		if where := serviceChainIn(m); where != "" {
			t.Errorf("%v: %q", m, where)
		}
	}
}
