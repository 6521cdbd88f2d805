package e2e

import (
	"fmt"
	"os"
	"testing"
)

type test struct {
	name string
	run  func(*testing.T)
}

// abreast are tests that wait for most of their time: those that are on the cluster of all, one after the other, and beside
// them some with clusters of their own. More than five kubelets at once want more inotify instances than the kernel gives one
// user, 128. By their file's name they come first: what they do to the cluster of all, the tests after them have to stand.
var abreast = []struct {
	shared, own []test
}{
	{
		[]test{{"APIServerAway", testAPIServerAway}, {"NodeComesAndGoes", testNodeComesAndGoes}},
		[]test{{"InstallAsOnK3s", testInstallAsOnK3s}, {"ServicesWithoutKubeProxy", testServicesWithoutKubeProxy}},
	},
	{
		[]test{{"UpgradeFromThePreviousCommit", testUpgradeFromThePreviousCommit}, {"BadUpdates", testBadUpdates}},
		[]test{{"MoveFromFlannel", testMoveFromFlannel}},
	},
	{ // Kubernetes takes half a minute to find what was killed.
		[]test{{"CrowdRolledOver", testCrowdRolledOver}},
		[]test{{"UpAndDown", testUpAndDown}, {"MoveFromFlannelHostGW", testMoveFromFlannelHostGW}},
	},
}

// long are those with clusters of their own that take more than they would be missed for.
var long = []test{{"BecomesDual", testBecomesDual}}

func TestAbreast(t *testing.T) {
	bare(t)
	// How nodes get ready is watched meanwhile, with nothing else going on.
	if _, err := makeStanding(); err != nil {
		t.Fatal(err)
	}
	for i, all := range abreast {
		t.Run(fmt.Sprint(i+1), func(t *testing.T) {
			inTurn(t, "Own", all.own)
			inTurn(t, "Shared", all.shared)
		})
	}
	if isLong() {
		for _, one := range long {
			t.Run(one.name, one.run)
		}
	}
}

func isLong() bool { return os.Getenv("TEST_LONG") == "1" }

// inTurn runs tests one after the other, beside those of other names.
func inTurn(t *testing.T, name string, tests []test) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		for _, one := range tests {
			t.Run(one.name, one.run)
		}
	})
}
