/* Help texts, shell completion and the manual page, all made from the table of commands. */
#include <string.h>

#include "tool.h"

static const char *const exit_codes[][2] = {
    {"0", "done; doctor: nothing is broken, and the dumps show no failure"},
    {"1", "doctor: something is broken, or the dumps show a failure; bench: the ranks failed"},
    {"2", "the command line is wrong"},
    {"3", "a file or folder can't be read or written, or not all output could be"},
};

static const char summary[] = "describes, tests, measures, plans and traces libdc";

static const char *const examples[] = {
    "libdc info",
    "libdc doctor",
    "LIBDC_DUMP_DIR=dumps python -m libdc.run -n 2 train.py; libdc doctor --dump dumps",
    "libdc trace dumps -o trace.json",
    "libdc bench --ranks 2 --json",
    "libdc plan layer --model bert-large",
};

/* Commands of the Python package, which installs a `libdc` of its own in front of this one. */
static const char *const package_commands[][2] = {
    {"plan MODEL", "memory, bytes and time of a training step; libdc plan MODEL --help"},
    {"sim MODEL", "how that step scales; libdc sim --help"},
    {"bench --machine FILE", "measures this machine for the two"},
};

/* "--ranks N" */
static void format_option(const option *o, char *text, size_t bytes) {
  snprintf(text, bytes, "%s%s%s", o->name, o->argument == NULL ? "" : " ", o->argument == NULL ? "" : o->argument);
}

/* An option's help, with the values that are allowed. */
static void format_option_help(const option *o, char *text, size_t bytes) {
  snprintf(text, bytes, "%s%s%s%s", o->help, o->values == NULL ? "" : " (", o->values == NULL ? "" : o->values,
           o->values == NULL ? "" : ")");
}

/* " FOLDER", " [COMMAND]", or nothing */
static void format_operand(const command *c, char *text, size_t bytes) {
  const bool optional = c->operand_optional;
  snprintf(text, bytes, "%s%s%s%s", c->operand == NULL ? "" : " ", optional ? "[" : "",
           c->operand == NULL ? "" : c->operand, optional ? "]" : "");
}

/* ---- help ---- */

static void print_overview(void) {
  printf("libdc: %s\n\nusage: libdc COMMAND [OPTION...]\n\ncommands:\n", summary);
  for (int i = 0; i < command_count; i++) {
    printf("  %-12s %s\n", commands[i].name, commands[i].summary);
  }
  puts("\nThe Python package adds, for a config.json of Hugging Face or a JSON of layers:");
  for (size_t i = 0; i < COUNT(package_commands); i++) {
    printf("  %-22s %s\n", package_commands[i][0], package_commands[i][1]);
  }
  puts("\nlibdc COMMAND --help tells more; libdc --version (or -V) names the version.\n\nexit codes:");
  for (size_t i = 0; i < COUNT(exit_codes); i++) {
    printf("  %-12s %s\n", exit_codes[i][0], exit_codes[i][1]);
  }
}

void print_help(const command *c) {
  if (c == NULL) {
    print_overview();
    return;
  }
  char operand[32];
  format_operand(c, operand, sizeof operand);
  printf("libdc %s: %s\n\nusage: libdc %s [OPTION...]%s\n\n%s\noptions:\n", c->name, c->summary, c->name, operand,
         c->text);
  for (int i = 0; i < MAX_OPTIONS && c->options[i].name != NULL; i++) {
    char text[64], help[160];
    format_option(&c->options[i], text, sizeof text);
    format_option_help(&c->options[i], help, sizeof help);
    printf("  %-22s %s\n", text, help);
  }
  printf("  %-22s %s\n", "--help", "prints this");
}

int run_help(const args *a) {
  const command *chosen = NULL;
  for (int i = 0; i < command_count && a->operand != NULL; i++) {
    chosen = strcmp(commands[i].name, a->operand) == 0 ? &commands[i] : chosen;
  }
  print_help(chosen);
  return EXIT_OK;
}

/* ---- the manual page ---- */

/* Text for roff: backslashes and hyphens are themselves, and no line begins with a control character. */
static void print_roff(const char *text) {
  bool start = true;
  for (; *text != '\0'; text++) {
    if (start && (*text == '.' || *text == '\'')) {
      fputs("\\&", stdout);
    }
    start = *text == '\n';
    if (*text == '\\') {
      fputs("\\e", stdout);
    } else if (*text == '-') {
      fputs("\\-", stdout);
    } else {
      putchar(*text);
    }
  }
}

static void print_roff_pair(const char *tag, const char *text) {
  fputs(".TP\n\\fB", stdout);
  print_roff(tag);
  fputs("\\fR\n", stdout);
  print_roff(text);
  putchar('\n');
}

static void print_man_command(const command *c) {
  char operand[32];
  format_operand(c, operand, sizeof operand);
  printf(".SS libdc %s%s\n", c->name, operand);
  print_roff(c->summary);
  fputs(".\n.PP\n", stdout);
  print_roff(c->text);
  for (int i = 0; i < MAX_OPTIONS && c->options[i].name != NULL; i++) {
    char text[64], help[160];
    format_option(&c->options[i], text, sizeof text);
    format_option_help(&c->options[i], help, sizeof help);
    print_roff_pair(text, help);
  }
  print_roff_pair("--help", "prints this");
}

int run_man(const args *a) {
  (void)a;
  printf(".TH LIBDC 1 \"\" \"libdc %s\" \"User Commands\"\n.SH NAME\nlibdc \\- ", dc_version_string());
  print_roff(summary);
  fputs(
      "\n.SH SYNOPSIS\n\\fBlibdc\\fR \\fICOMMAND\\fR [\\fIOPTION\\fR...]\n.br\n\\fBlibdc \\-\\-version\\fR | "
      "\\fB\\-\\-help\\fR\n",
      stdout);
  fputs(".SH COMMANDS\n", stdout);
  for (int i = 0; i < command_count; i++) {
    print_man_command(&commands[i]);
  }
  fputs(".SH COMMANDS OF THE PYTHON PACKAGE\n", stdout);
  for (size_t i = 0; i < COUNT(package_commands); i++) {
    print_roff_pair(package_commands[i][0], package_commands[i][1]);
  }
  fputs(".SH EXIT STATUS\n", stdout);
  for (size_t i = 0; i < COUNT(exit_codes); i++) {
    print_roff_pair(exit_codes[i][0], exit_codes[i][1]);
  }
  fputs(".SH ENVIRONMENT\n", stdout);
  print_roff_pair("LIBDC_DUMP_DIR", "read by the Python package, not here: where a rank that fails writes its dump");
  print_roff_pair("LIBDC_PYTHON",
                  "the interpreter that libdc doctor asks about the package and the adapter; python3 without it");
  fputs(".SH EXAMPLES\n.nf\n", stdout);
  for (size_t i = 0; i < COUNT(examples); i++) {
    print_roff(examples[i]);
    putchar('\n');
  }
  fputs(".fi\n", stdout);
  return EXIT_OK;
}

/* ---- completion ---- */

static void print_words(const char *values) {
  for (; *values != '\0'; values++) {
    putchar(*values == '|' ? ' ' : *values);
  }
}

static void print_bash_values(const char *name, const char *values) {
  printf("    %s) COMPREPLY=($(compgen -W '", name);
  print_words(values);
  puts("' -- \"$word\")); return ;;");
}

static void print_bash_completion(void) {
  puts(
      "# bash completion for libdc: source <(libdc completion bash)\n_libdc() {\n"
      "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}\n"
      "  COMPREPLY=()\n  if [ \"$COMP_CWORD\" -eq 1 ]; then");
  fputs("    COMPREPLY=($(compgen -W '--help --version", stdout);
  for (int i = 0; i < command_count; i++) {
    printf(" %s", commands[i].name);
  }
  puts("' -- \"$word\"))\n    return\n  fi\n  case ${COMP_WORDS[1]}.$before in");
  for (int i = 0; i < command_count; i++) {
    const command *c = &commands[i];
    for (int k = 0; k < MAX_OPTIONS && c->options[k].name != NULL; k++) {
      char name[64];
      snprintf(name, sizeof name, "%s.%s", c->name, c->options[k].name);
      if (c->options[k].values != NULL) {
        print_bash_values(name, c->options[k].values);
      } else if (c->options[k].argument != NULL) {
        printf("    %s) compopt -o default; return ;;\n", name);
      }
    }
  }
  puts("  esac\n  case ${COMP_WORDS[1]} in");
  for (int i = 0; i < command_count; i++) {
    const command *c = &commands[i];
    printf("    %s) COMPREPLY=($(compgen -W '--help", c->name);
    for (int k = 0; k < MAX_OPTIONS && c->options[k].name != NULL; k++) {
      printf(" %s", c->options[k].name);
    }
    if (c->operand_values != NULL) {
      putchar(' ');
      print_words(c->operand_values);
    }
    printf("' -- \"$word\"))%s ;;\n", c->operand == NULL ? "" : "; compopt -o default");
  }
  puts("  esac\n}\ncomplete -F _libdc libdc");
}

/* For single quotes; special: what a backslash must precede even there. */
static void print_quoted(const char *text, const char *special) {
  for (; *text != '\0'; text++) {
    if (*text == '\'') {
      fputs("'\\''", stdout);
    } else if (strchr(special, *text) != NULL) {
      printf("\\%c", *text);
    } else {
      putchar(*text);
    }
  }
}

static const char in_zsh[] = "[]:\\";

static void print_zsh_completion(void) {
  puts(
      "#compdef libdc\n# zsh completion for libdc: source <(libdc completion zsh)\n_libdc() {\n"
      "  if (( CURRENT == 2 )); then\n    local -a commands=(");
  for (int i = 0; i < command_count; i++) {
    printf("      '%s:", commands[i].name);
    print_quoted(commands[i].summary, in_zsh);
    puts("'");
  }
  puts(
      "    )\n    _describe command commands\n    return\n  fi\n  local chosen=$words[2]\n"
      "  words=(libdc \"${(@)words[3,-1]}\")\n  (( CURRENT -= 1 ))\n  case $chosen in");
  for (int i = 0; i < command_count; i++) {
    const command *c = &commands[i];
    printf("    %s) _arguments '--help[prints help]'", c->name);
    for (int k = 0; k < MAX_OPTIONS && c->options[k].name != NULL; k++) {
      const option *o = &c->options[k];
      printf(" '%s[", o->name);
      print_quoted(o->help, in_zsh);
      putchar(']');
      if (o->values != NULL) {
        printf(":%s:(", o->argument);
        print_words(o->values);
        putchar(')');
      } else if (o->argument != NULL) {
        printf(":%s:_files", o->argument);
      }
      putchar('\'');
    }
    if (c->operand_values != NULL) {
      printf(" '1:%s:(", c->operand);
      print_words(c->operand_values);
      fputs(")'", stdout);
    } else if (c->operand != NULL) {
      printf(" '1:%s:_files'", c->operand);
    }
    puts(" ;;");
  }
  puts("  esac\n}\nif [ \"$funcstack[1]\" = _libdc ]; then _libdc \"$@\"; else compdef _libdc libdc; fi");
}

static void print_fish_value(const char *condition, const char *values) {
  printf("complete -c libdc -n '%s' -f -a '", condition);
  print_words(values);
  puts("'");
}

static void print_fish_completion(void) {
  puts("# fish completion for libdc: libdc completion fish | source");
  for (int i = 0; i < command_count; i++) {
    const command *c = &commands[i];
    char condition[80];
    snprintf(condition, sizeof condition, "__fish_seen_subcommand_from %s", c->name);
    printf("complete -c libdc -n __fish_use_subcommand -f -a %s -d '", c->name);
    print_quoted(c->summary, "");
    puts("'");
    if (c->operand_values != NULL) {
      print_fish_value(condition, c->operand_values);
    }
    for (int k = 0; k < MAX_OPTIONS && c->options[k].name != NULL; k++) {
      const option *o = &c->options[k];
      printf("complete -c libdc -n '%s' -l %s%s -d '", condition, o->name + 2, o->argument == NULL ? "" : " -r");
      print_quoted(o->help, "");
      putchar('\'');
      if (o->values != NULL) {
        fputs(" -f -a '", stdout);
        print_words(o->values);
        putchar('\'');
      }
      putchar('\n');
    }
  }
}

int run_completion(const args *a) {
  static const struct {
    const char *shell;
    void (*print)(void);
  } shells[] = {{"bash", print_bash_completion}, {"zsh", print_zsh_completion}, {"fish", print_fish_completion}};
  for (size_t i = 0; i < COUNT(shells); i++) {
    if (strcmp(a->operand, shells[i].shell) == 0) {
      shells[i].print();
    }
  }
  return EXIT_OK;
}
