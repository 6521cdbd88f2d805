package wire

import (
	"encoding/json"
	"math"
	"net/netip"
	"testing"
)

func TestAddr(t *testing.T) {
	mapped := [12]byte{10: 0xff, 11: 0xff}
	v4 := func(a, b, c, d byte) (out Addr) {
		copy(out[:], mapped[:])
		copy(out[12:], []byte{a, b, c, d})
		return out
	}
	for _, c := range []struct {
		in   netip.Addr
		want Addr
		text string
	}{
		{netip.MustParseAddr("10.244.1.7"), v4(10, 244, 1, 7), "10.244.1.7"},
		{netip.MustParseAddr("::ffff:10.244.1.7"), v4(10, 244, 1, 7), "10.244.1.7"},
		{netip.MustParseAddr("0.0.0.0"), v4(0, 0, 0, 0), "0.0.0.0"},
		{netip.MustParseAddr("2001:db8::1"), Addr{0x20, 0x01, 0x0d, 0xb8, 15: 1}, "2001:db8::1"},
		{netip.Addr{}, Addr{}, "-"},
	} {
		got := AddrFrom(c.in)
		if got != c.want || got.String() != c.text {
			t.Errorf("AddrFrom(%v) = %x (%s), want %x (%s)", c.in, got, got, c.want, c.text)
		}
		if back := got.Netip(); back != c.in.Unmap() {
			t.Errorf("%v comes back as %v", c.in, back)
		}
		raw, err := json.Marshal(got)
		if err != nil || string(raw) != `"`+c.text+`"` {
			t.Errorf("JSON of %v is %s, %v", c.in, raw, err)
		}
	}
}

func TestPort(t *testing.T) {
	if got := PortFrom(443); got != (Port{0x01, 0xbb}) {
		t.Errorf("PortFrom(443) = %x, want network order", got)
	}
	for p := range math.MaxUint16 + 1 {
		if got := PortFrom(uint16(p)).Host(); int(got) != p {
			t.Fatalf("port %d comes back as %d", p, got)
		}
	}
	if got := PortFrom(65535).String(); got != "65535" {
		t.Errorf("text of port 65535 is %q", got)
	}
}

func TestTuple(t *testing.T) {
	tuple := Tuple{
		Src: AddrFrom(netip.MustParseAddr("10.0.0.1")), Dst: AddrFrom(netip.MustParseAddr("2001:db8::1")),
		Sport: PortFrom(1), Dport: PortFrom(80), Proto: TCP,
	}
	if got, want := tuple.String(), "tcp 10.0.0.1:1 > [2001:db8::1]:80"; got != want {
		t.Errorf("text is %q, want %q", got, want)
	}
}

func TestTexts(t *testing.T) {
	for got, want := range map[string]string{
		MAC{2, 0, 0xab, 0, 0, 1}.String(): "02:00:ab:00:00:01",
		ICMP.String():                     "icmp",
		TCP.String():                      "tcp",
		UDP.String():                      "udp",
		Protocol(132).String():            "132",
		FromPod.String():                  "from_pod",
		ToUplink.String():                 "to_uplink",
		Direction(200).String():           "200",
		Bits(5, "a", "b", "c"):            "a|c",
		Bits(8, "a", "b", "c"):            "-",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
