package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/test/vm/wire"
)

func TestParseTestFlags(t *testing.T) {
	o, err := parseTestFlags(strings.Fields("-v --run TestA/b -packets=7 -seed=3"))
	check(t, err)
	want := testOptions{verbose: true, run: "TestA/b", rest: []string{"-packets=7", "-seed=3"}}
	if diff := cmp.Diff(want, o, cmp.AllowUnexported(testOptions{})); diff != "" {
		t.Error(diff)
	}
	if o.whole() {
		t.Error("with -run all tests are said to run")
	}
	for _, bad := range []string{"TestA", "-run", "-skip=X", "-count=2", "-short"} {
		if _, err := parseTestFlags(strings.Fields(bad)); err == nil || !strings.Contains(err.Error(), "TESTFLAGS") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestTheLabHasAMachineOfItsOwn(t *testing.T) {
	at := func(dir string) suite { return suite{Suite: wire.Suite{Dir: dir}} }
	for want, all := range map[string][]suite{
		"pkg/a pkg/b; test/e2e": {at("pkg/a"), at("test/e2e"), at("pkg/b")}, "pkg/a": {at("pkg/a")}, "test/e2e": {at("test/e2e")},
	} {
		var got []string
		for _, part := range machines(all) {
			var dirs []string
			for _, s := range part {
				dirs = append(dirs, s.Dir)
			}
			got = append(got, strings.Join(dirs, " "))
		}
		if got := strings.Join(got, "; "); got != want {
			t.Errorf("the machines run %q, want %q", got, want)
		}
	}
}

// What -run says holds on every kernel; else each has its own, and a package of which it runs nothing is not started.
func TestEachKernelHasItsTests(t *testing.T) {
	dir, narrow := "test/lab", narrowed["6.12"]
	if narrow[dir] != nothing || selected[dir] != "" {
		t.Fatalf("%s is no example any more", dir)
	}
	all := []suite{
		{Suite: wire.Suite{Dir: dir}, tests: []string{"TestA", "TestB"}},
		{Suite: wire.Suite{Dir: "pkg/datapath"}, tests: []string{"TestA", "TestVerifier"}},
	}
	for _, c := range []struct {
		o      testOptions
		series string
		want   map[string][]string
	}{
		{testOptions{}, "6.1", map[string][]string{dir: {"TestA", "TestB"}, "pkg/datapath": {"TestVerifier"}}},
		{testOptions{}, "6.12", map[string][]string{"pkg/datapath": {"TestVerifier"}}},
		{testOptions{}, "", map[string][]string{dir: {"TestA", "TestB"}, "pkg/datapath": {"TestVerifier"}}},
		{testOptions{named: true}, "6.12", map[string][]string{dir: {"TestA", "TestB"}, "pkg/datapath": {"TestVerifier"}}},
		{testOptions{run: "TestA/b"}, "6.12", map[string][]string{dir: {"TestA"}, "pkg/datapath": {"TestA"}}},
	} {
		suites, err := c.o.suites(all, c.series)
		check(t, err)
		got := make(map[string][]string)
		for _, s := range suites {
			got[s.Dir] = s.tests
			if want := "-test.run=" + c.o.pattern(s.Dir, c.series); !slices.Contains(s.Args, want) {
				t.Errorf("%q: %q, want %s", c.series, s.Args, want)
			}
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%+v on %q: %s", c.o, c.series, diff)
		}
	}
	for _, run := range []string{"TestNone", "("} {
		if _, err := (testOptions{run: run}).suites(all, "6.1"); err == nil {
			t.Errorf("-run %s is no error", run)
		}
	}
}

// A test that was renamed or removed would silently run no more.
func TestSelectedTestsExist(t *testing.T) {
	root, err := moduleRoot(t.Context())
	check(t, err)
	all := []selection{selected}
	for _, of := range narrowed {
		all = append(all, of)
	}
	for _, one := range all {
		for dir, pattern := range one {
			names := testNames(t, filepath.Join(root, dir))
			if pattern == nothing {
				continue
			}
			for name := range strings.SplitSeq(strings.TrimSuffix(strings.TrimPrefix(pattern, "^("), ")$"), "|") {
				if !slices.ContainsFunc(names, regexp.MustCompile("^"+name+"$").MatchString) {
					t.Errorf("%s has no %s", dir, name)
				}
			}
		}
	}
}

// What a test of test/e2e does with clsact only in its long form is proven with it on Linux 6.1, or by another test.
func TestClsactIsProvenElsewhere(t *testing.T) {
	const (
		besides = "test/e2e TestServicesOfKubeProxy/clsact and TestServicesWithAProgramRemoved/clsact"
		walks   = "a packet meets the same programs either way, as the tests on Linux 6.1 show for the stack, pods, nodes and the world"
	)
	elsewhere := map[string]string{
		"TestFlowsOutliveTheModeBesideNetfilter":           "pkg/datapath TestLiveFlowsOutliveAChangeOfMode/clsact",
		"TestMasqueradeOfNetfilterWithAProgramRemoved":     besides,
		"TestMasqueradeOfNetfilterOnAPodsPort":             besides,
		"TestErrorsOfAnotherNodeBesideNetfilter":           besides,
		"TestManifestsRights":                              "pkg/datapath TestLoadWithFewRights/clsact",
		"TestEveryPortInUse":                               walks,
		"TestServicesOutliveTheAgent":                      walks,
		"TestServicesTakenOverFromKubeProxy":               walks,
		"TestServicesSwitchedOff":                          "pkg/datapath's tests of Services, in every way of attaching",
		"TestServiceFlowsHaveShares":                       walks,
		"TestServiceSpread":                                walks,
		"TestServiceTooBig":                                walks,
		"TestSameSourcePortToTheSameServer":                walks,
		"TestFlowsOutliveTheTunnelsDevice":                 "test/e2e TestLifeRepairs/clsact",
		"TestHostSocketKeepsItsPort":                       walks,
		"TestWorldOpensTheTupleThatIsMasqueraded":          walks,
		"TestNewOwnerOfAnAddressInheritsNothing":           walks,
		"TestFullTableSparesTheEstablished":                walks,
		"TestAddressWithoutPod":                            walks,
		"TestHopsEndAndSaySo":                              walks,
		"TestWorldLearnsOfClosedPodPort":                   walks,
		"TestForgottenConnectionIsReset":                   walks,
		"TestRuleThatAsksForAMark":                         walks,
		"TestFloodOfNeighbours":                            walks,
		"TestShortConnections":                             walks,
		"TestPolicyOfTheHost":                              walks,
		"TestForgedErrorEndsNoConnection":                  walks,
		"TestErrorsOfTheNodeAboutAnswers":                  walks,
		"TestShapesBesideNetfilter":                        walks,
		"TestPodsAreNoRouters":                             walks,
		"TestUplinkWithoutItsAddressForAMoment":            walks,
		"TestContainersCannotSpoof":                        walks,
		"TestSpoofedSourceIsDropped":                       walks,
		"TestPodsDoNotNeedTheAgent":                        "pkg/attach TestAttachOutlivesTheProcess/clsact",
		"TestKernelRefusesSpoofedSourcesWithoutTheProgram": "the program is gone, so that it does not matter how it was attached",
		"TestGatewayIsAnswered":                            "test/prog TestGatewaySolicited, on Linux 6.1",
		"TestPodsOfANodeThatDoesNotAnswer":                 "test/prog TestSilentNeighbours, on Linux 6.1",
		"TestFollowedRouterStays":                          "pkg/agent's tests of accept_ra, which attaches nothing",
		"TestForeignRoutesAreLittleWork":                   "test/e2e TestLifeRepairs/clsact and pkg/agent TestWhichEventsCallForAPass",
	}
	root, err := moduleRoot(t.Context())
	check(t, err)
	files, err := filepath.Glob(filepath.Join(root, "test/e2e", "*_test.go"))
	check(t, err)
	on61 := regexp.MustCompile(selected["test/e2e"])
	found := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		check(t, err)
		for _, story := range regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\) \{\n(?:\t.*\n)*?\tforNewestAttach\(`).FindAllSubmatch(text, -1) {
			found++
			if name := string(story[1]); !on61.MatchString(name) && elsewhere[name] == "" {
				t.Errorf("%s with clsact runs neither here nor on Linux 6.1: use forEachAttach, or name what proves it", name)
			}
		}
	}
	if found < len(elsewhere) {
		t.Errorf("found %d tests with forNewestAttach", found)
	}
}

// testNames are the tests of the package in a directory.
func testNames(t *testing.T, dir string) (names []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	check(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		check(t, err)
		for _, found := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllSubmatch(text, -1) {
			names = append(names, string(found[1]))
		}
	}
	if len(names) == 0 {
		t.Errorf("%s has no tests", dir)
	}
	return names
}
