package endpoint

import (
	"errors"
	"fmt"
	"strings"
)

// longestName is the length in bytes of the longest name of a Kubernetes object.
const longestName = 253

// CheckPod returns a pod's "namespace/name" and its uid. What can't be one, such as a text that could control a
// terminal, is left out, and named in the error. An empty text is no error.
func CheckPod(pod, uid string) (string, string, error) {
	var errs []error
	namespace, name, _ := strings.Cut(pod, "/")
	if pod != "" && (!isName(name) || namespace != "" && !isName(namespace)) {
		errs = append(errs, fmt.Errorf("%.64q is no pod's namespace and name", pod))
		pod = ""
	}
	if uid != "" && !isName(uid) {
		errs = append(errs, fmt.Errorf("%.64q is no pod's uid", uid))
		uid = ""
	}
	return pod, uid, errors.Join(errs...)
}

// isName accepts what Kubernetes does, and the names that other runtimes give.
func isName(text string) bool {
	return text != "" && len(text) <= longestName && !strings.ContainsFunc(text, func(r rune) bool {
		letter := 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z'
		return !letter && (r < '0' || r > '9') && !strings.ContainsRune("-_.", r)
	})
}

// NamespaceOf returns the namespace of "namespace/name", empty where it is not known.
func NamespaceOf(pod string) string {
	namespace, _, _ := strings.Cut(pod, "/")
	return namespace
}
