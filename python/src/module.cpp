// SPDX-License-Identifier: Apache-2.0
// fastweight._core: the C interface for Python. No type of it is meant for users but Context and Plan.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "chain.hpp"
#include "context.hpp"
#include "opaque.hpp"
#include "operations.hpp"
#include "verb.hpp"

namespace nb = nanobind;
using namespace fastweight::python;

namespace {

// [(name, gate, erase)] of the C catalogue, by_axes first.
nb::list catalogue() {
  constexpr const char *gates[] = {"none", "scalar", "vector"};
  constexpr const char *erases[] = {"none", "shared_after", "shared_before", "independent"};
  nb::list rows;
  for (fw_op op = 0; op < FW_OP_COUNT; ++op) {
    fw_gate gate = 0;
    fw_erase erase = 0;
    if (op != FW_OP_BY_AXES) check_status(fw_op_axes(op, &gate, &erase));
    rows.append(nb::make_tuple(fw_op_name(op), gates[gate], erases[erase]));
  }
  return rows;
}

}  // namespace

NB_MODULE(_core, module) {
  nb::set_leak_warnings(false);  // functions of fastweight.ops hold verbs for the life of the process
  watch_forks();

  nb::class_<Context>(module, "Context", nb::is_weak_referenceable(),
      "Threads that run the work. Results do not depend on their number.\n\n"
      "threads: 1 and more; 0: FW_NUM_THREADS, else the cores of the process. force_impl: an implementation by name\n"
      "(\"reference_recurrent\"); a call for which it refuses fails with its reason. Safe to use from several threads,\n"
      "and in the child after os.fork().")
      .def(nb::init<int, const std::string &>(), nb::arg("threads") = 0, nb::kw_only(), nb::arg("force_impl") = "")
      .def_prop_ro("threads", &Context::threads, "Threads, the calling one included.")
      .def_prop_ro("cpu_level", &Context::cpu_level, "\"baseline\", \"avx2\" or \"avx512\".")
      .def_prop_ro("force_impl", &Context::force_impl, "The forced implementation, \"\" for none.")
      .def("__repr__", [](Context &self) {
        return "Context(threads=" + std::to_string(self.threads()) +
               (self.force_impl().empty() ? "" : ", force_impl=\"" + self.force_impl() + "\"") + ")";
      });

  nb::class_<Verb>(module, "Verb")
      .def(nb::init<const std::string &, int, const std::string &, const std::vector<std::string> &, int, const nb::dict &, int>())
      .def("__call__", &Verb::call)
      .def("forward", &Verb::forward, nb::arg("values"), nb::arg("save"))
      .def("backward", &Verb::backward, nb::arg("values"), nb::arg("incoming"), nb::arg("saved").none(), nb::arg("wanted"))
      .def("saved_size", nb::overload_cast<const nb::tuple &>(&Verb::saved_size, nb::const_), nb::arg("values"))
      .def_prop_ro("label", &Verb::label)
      .def_prop_ro("n_positional", &Verb::n_positional)
      .def_prop_ro("arguments", [](const Verb &self) {
        nb::list names;
        for (const Argument &argument : self.arguments()) names.append(argument.name);
        return nb::tuple(names);
      });

  nb::class_<Plan>(module, "Plan",
      "A call with everything fixed but the data; made by fastweight.ops.plan. Call it with new tensors of the same types,\n"
      "shapes and strides, in the order of the function; tensors that were given by keyword stay until others are given.")
      .def(nb::init<const Verb &, const nb::tuple &, const nb::object &>(), nb::keep_alive<1, 2>(), nb::arg("verb"), nb::arg("values"),
           nb::arg("out") = nb::none())
      .def("__call__", &Plan::call)
      .def("explain", &Plan::explain, "Which implementation runs, one line a candidate, the chosen one marked with *.")
      .def_prop_ro("names", &Plan::names, "The tensors of the plan, in order.")
      .def("__repr__", &Plan::repr);

  nb::class_<Chain>(module, "Chain",
      "Plans and copies that run one after the other as one call; made by fastweight.ops.chain. Call it with new tensors of the\n"
      "same types, shapes and strides as those that it was made with, in their order.")
      .def(nb::init<const nb::tuple &, const nb::tuple &>())
      .def("__call__", &Chain::call)
      .def("__repr__", &Chain::repr);

  module.def("state_import", &state_import, nb::arg("state").none(), nb::arg("state_layout") = "kv", nb::arg("dtype") = nb::none(),
             "A state in the library's own layout, [slots,HV,E], from [slots,HV,K,V] (state_layout \"kv\") or [slots,HV,V,K] (\"vk\").\n\n"
             "float32, bfloat16 or float16; dtype: of the result, None for the state's. A step takes it with state_layout=\"opaque\".\n"
             "A new array; ValueError for what is no state.");
  module.def("state_export", &state_export, nb::arg("state").none(), nb::arg("K"), nb::arg("V"), nb::arg("state_layout") = "kv",
             nb::arg("dtype") = nb::none(), "The plain state of an opaque one of this K and V: state_import the other way.");
  module.def("catalogue", &catalogue);
  module.def("version", [] { return fw_version(); });
  module.def("cuda_devices", [] {
    uint64_t needed = 0;
    check_status(fw_cuda_devices(nullptr, 0, &needed));
    std::string text(needed, 0);
    check_status(fw_cuda_devices(text.data(), needed, nullptr));
    return nb::str(text.c_str());
  }, "One line a CUDA device, or \"none\" and why.");
  module.def("last_impl", [] { return fw_last_impl(); },
             "Name of the implementation that the last call of this thread used, \"\" before the first.");
  module.def("default_context", &default_context,
             "The context of calls that name none. Threads: set_num_threads, else FW_NUM_THREADS, else torch.get_num_threads()\n"
             "while torch is loaded, else the cores of the process.");
  module.def("set_num_threads", &set_default_num_threads, nb::arg("threads"),
             "Threads of the default context; 0 gives the choice back to the rule of default_context.");
}
