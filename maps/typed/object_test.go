package typed_test

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

func TestCName(t *testing.T) {
	for in, want := range map[string]string{
		"Ifindex":     "ifindex",
		"PodMAC":      "pod_mac",
		"PodCIDRLens": "pod_cidr_lens",
		"MTU":         "mtu",
		"ID":          "id",
		"ToAddress":   "to_address",
		"SeqEnd":      "seq_end",
		"Identity":    "identity",
	} {
		if got := typed.CName(in); got != want {
			t.Errorf("CName(%q) = %q, want %q", in, got, want)
		}
	}
}

func addr(text string) wire.Addr { return wire.AddrFrom(netip.MustParseAddr(text)) }

func TestFlatten(t *testing.T) {
	key := snat.Key{Src: addr("10.244.1.7"), Dst: addr("2001:db8::1"), Sport: wire.PortFrom(4000), Dport: wire.PortFrom(443), Proto: wire.TCP}
	value := snat.Value{
		ToAddress: addr("172.18.0.2"), ToPort: wire.PortFrom(50001), State: flow.SYN | flow.ACK, Flags: 0,
		Ifindex: 42, SeqEnd: 4294967295, Ack: 1, LastSeen: 9007199254740993,
	}
	got, err := json.Marshal(typed.ObjectOf(key, value))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"src":"10.244.1.7","dst":"2001:db8::1","sport":4000,"dport":443,"proto":"tcp",` +
		`"to_address":"172.18.0.2","to_port":50001,"state":"syn|ack","flags":"","ifindex":42,` +
		`"seq_end":4294967295,"ack":1,"last_seen":9007199254740993,"far_address":"","set":0,"backend":0,"generation":0,"far_port":0,"pod":0}`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Error(diff)
	}
}

func TestFlattenLeavesOutPadding(t *testing.T) {
	for _, o := range []typed.Object{typed.ObjectOf(conntrack.Value{}), typed.ObjectOf(devices.Value{}), typed.ObjectOf(wire.Tuple{})} {
		for _, f := range o {
			if f.Name == "_" || f.Name == "" {
				t.Errorf("padding is shown: %v", o)
			}
		}
	}
}

func TestFlattenAbsentIsEmpty(t *testing.T) {
	for _, f := range typed.ObjectOf(devices.Value{}) {
		if f.Name == "ipv4" && f.Value != "" {
			t.Errorf("an absent address is %q, want empty text", f.Value)
		}
	}
}

func TestAge(t *testing.T) {
	const now = uint64(100 * 24 * time.Hour)
	for _, c := range []struct {
		ago  time.Duration
		want string
	}{
		{0, "0s"},
		{1500 * time.Millisecond, "1s"},
		{119 * time.Second, "119s"},
		{2 * time.Minute, "2m"},
		{2 * time.Hour, "2h"},
		{47 * time.Hour, "47h"},
		{48 * time.Hour, "2d"},
		{-time.Second, "0s"},
	} {
		if got := typed.Age(now, now-uint64(c.ago)); got != c.want {
			t.Errorf("Age of %v = %q, want %q", c.ago, got, c.want)
		}
	}
	if got := typed.Age(now, 0); got != "-" {
		t.Errorf("Age of never = %q, want -", got)
	}
}

func TestTextDoesNotSteerTheTerminal(t *testing.T) {
	table := typed.Table{
		Columns: typed.Columns("ID"), Len: 1,
		Cells: func(int) []string { return []string{"a\x1b[2J\nb\u009bc"} },
	}
	var b strings.Builder
	if err := table.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	if got := b.String(); got != "ID\na?[2J?b?c\n" {
		t.Errorf("%q", got)
	}
}
