package bpf

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
)

// mapRows reads the table of maps: for each map which of the programs write or read it, as the two columns say.
func mapRows(t *testing.T, types map[string]ebpf.ProgramType) map[string][]string {
	t.Helper()
	text, err := os.ReadFile("../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(text), "| map | who writes | who reads | on loss |\n|---|---|---|---|\n")
	if !found {
		t.Fatal("ARCHITECTURE.md has no table of maps")
	}
	table, _, _ = strings.Cut(table, "\n\n")
	quoted := regexp.MustCompile("`([a-z_]+)`")
	rows := map[string][]string{}
	for line := range strings.Lines(table) {
		columns := strings.Split(line, "|")
		said := columns[2] + "," + columns[3]
		var named []string
		for _, user := range slices.Sorted(maps.Keys(types)) {
			most := user == DataplaneProgEcFromPod || strings.HasSuffix(user, "_uplink") || strings.HasSuffix(user, "_l3")
			all := types[user] == ebpf.SchedCLS && strings.Contains(said, "all programs")
			most = most && strings.Contains(said, "`ec_from_pod` and uplinks' programs")
			// Those on sockets are named without their family, those for uplinks without an Ethernet header as the others.
			name := strings.TrimRight(strings.Replace(user, "_l3", "_uplink", 1), "46")
			if all || most || strings.Contains(said, "`"+name+"`") {
				named = append(named, user)
			}
		}
		for _, m := range quoted.FindAllStringSubmatch(columns[1], -1) {
			rows[m[1]] = named
		}
	}
	return rows
}

// ARCHITECTURE.md names, for each pinned map, exactly the programs that use it.
func TestArchitectureNamesTheUsersOfMaps(t *testing.T) {
	spec, err := LoadDataplane()
	if err != nil {
		t.Fatal(err)
	}
	types, use := map[string]ebpf.ProgramType{}, map[string][]string{}
	for _, user := range slices.Sorted(maps.Keys(spec.Programs)) {
		types[user] = spec.Programs[user].Type
		for _, in := range spec.Programs[user].Instructions {
			if name := in.Reference(); spec.Maps[name] != nil && !slices.Contains(use[name], user) {
				use[name] = append(use[name], user)
			}
		}
	}
	rows := mapRows(t, types)
	for _, private := range []string{DataplaneMapPaths, DataplaneMapRefusals, DataplaneMapScratch, ".rodata"} {
		delete(use, private)
	}
	for _, name := range slices.Sorted(maps.Keys(use)) {
		if !slices.Equal(rows[name], use[name]) {
			t.Errorf("map %s: the row says %v, the programs that use it are %v", name, rows[name], use[name])
		}
		delete(rows, name)
	}
	for name := range rows {
		t.Errorf("map %s is used by no program", name)
	}
}
