package main

import (
	"strings"
	"testing"
)

const header = `
/* Kinds. */
enum fruit_kind {
	FRUIT_NONE,        /* no fruit */
	FRUIT_POD_CIDR,    /* of "another" node */
	FRUIT_IPV6_NOT_IP, /* neither */
	FRUIT_KINDS,
};

enum fruit_flags {
	FRUIT_RIPE = 1,
	FRUIT_VIA_STACK = 2, /* eaten on the way */
};

enum fruit_layout {
	FRUIT_SLOTS = 64,
	LAYOUT_VERSION = 1,
};

struct fruit {
	enum fruit_kind kind;
};
`

func TestGenerate(t *testing.T) {
	enums, err := parse(header)
	if err != nil {
		t.Fatal(err)
	}
	plain, err := generate("fruit", enums, false, false)
	if err != nil {
		t.Fatal(err)
	}
	loud, err := generate("fruit", enums, true, true)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		source []byte
		want   bool
		text   string
	}{
		{plain, true, "None Kind = iota // no fruit"},
		{plain, true, "IPv6NotIP // neither"},
		{plain, true, "\tKinds\n"},
		{plain, true, `PodCIDR: "pod_cidr"`},
		{plain, false, `Kinds: `},
		{plain, false, "Explain"},
		{plain, true, "ViaStack Flags = 2 // eaten on the way"},
		{plain, true, `wire.Bits(uint32(v), "ripe", "via_stack")`},
		{plain, true, "Slots = 64"},
		{plain, true, "LayoutVersion = 1"},
		{loud, true, `PodCIDR: "POD_CIDR"`},
		{loud, true, `PodCIDR: "of \"another\" node"`},
		{loud, true, `"unknown to this version"`},
	} {
		// gofmt aligns with spaces.
		if got := strings.Join(strings.Fields(string(c.source)), " "); strings.Contains(got, strings.TrimSpace(c.text)) != c.want {
			t.Errorf("is %q there? want %v:\n%s", c.text, c.want, c.source)
		}
	}
}

func TestRefuses(t *testing.T) {
	for name, c := range map[string]struct{ header, says string }{
		"an expression":               {"enum a_flags {\n\tA = 1 << 2,\n};", "line 2"},
		"two in a line":               {"enum a {\n\tA, B,\n};", "line 2"},
		"no comma":                    {"enum a {\n\tA\n};", "line 2"},
		"values for some":             {"enum a {\n\tA,\n\tB = 7,\n};", "line 3"},
		"a comment of its own line":   {"enum a {\n\t/* about A */\n\tA,\n};", "line 2"},
		"a brace in the next line":    {"enum a\n{\n\tA,\n};", "line 1"},
		"a bit that is left out":      {"enum a_flags {\n\tA_B = 1,\n\tA_C = 4,\n};", "A_C is not 2"},
		"what nobody explains":        {"enum a_kind {\n\tA_B, /* b */\n\tA_C,\n};", "A_C has no comment"},
		"a number that is none of 32": {"enum a_layout {\n\tA_B = 99999999999,\n};", "line 2"},
	} {
		enums, err := parse(c.header)
		if err == nil {
			_, err = generate("a", enums, false, true)
		}
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
